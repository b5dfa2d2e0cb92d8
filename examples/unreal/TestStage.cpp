// Uses everything in TidemarkStage.h. Compile it with any C++17 compiler:
//
//   c++ -std=c++17 -o /tmp/test-stage examples/unreal/TestStage.cpp && /tmp/test-stage
//
// Without arguments it checks the id; with a request id it prints the HTTP request to send; with a status and a body it
// tells what that response means.

#include "TidemarkStage.h"

#include <cstdlib>
#include <iostream>
#include <unordered_map>
#include <unordered_set>

static void Check(bool Holds, const char* What)
{
	if (!Holds)
	{
		std::cerr << "not so: " << What << "\n";
		std::exit(1);
	}
}

static void CheckTheId()
{
	const auto Gate = FStageHierarchicalId::OfProp(101, 1);
	Check(Gate.ToString() == "{101, 0, 1}", "a prop's key");
	Check(FStageHierarchicalId::OfAct(101, 2).ToString() == "{101, 2, 0}", "an act's key");
	Check(FStageHierarchicalId::Parse("{101, 0, 1}") == Gate, "a key is read");
	for (const char* Bad : {"", "{101, 0}", "{101,0,1}", "{101, 0, 1} ", "{101, 0, 01}", "{101, 0, x}"})
	{
		Check(!FStageHierarchicalId::Parse(Bad), Bad);
	}
	Check(Gate != FStageHierarchicalId::OfProp(101, 2), "other props are others");
	std::unordered_map<FStageHierarchicalId, int> States{{Gate, 2}, {FStageHierarchicalId::OfProp(101, 3), 5}};
	Check(States.at(Gate) == 2 && States.size() == 2, "ids are keys of a map");
	std::unordered_set<std::uint32_t> Hashes;
	for (int Stage = 1; Stage <= 20; ++Stage)
	{
		for (int Number = 1; Number <= 50; ++Number)
		{
			Hashes.insert(GetTypeHash(FStageHierarchicalId::OfProp(Stage, Number)));
			Hashes.insert(GetTypeHash(FStageHierarchicalId::OfAct(Stage, Number)));
		}
	}
	Check(Hashes.size() == 2000, "neighbours have hashes of their own");
}

int main(int Count, char** Arguments)
{
	if (Count == 2)
	{
		const FStageRequest Request{Arguments[1]};
		std::cout << Request.Verb << " " << Request.Path << " HTTP/1.1\r\nHost: tidemark\r\nConnection: close\r\n"
				  << Request.RequestIdHeader << ": " << Request.RequestId << "\r\nContent-Type: " << Request.ContentType
				  << "\r\nContent-Length: " << std::string(Request.Body).size() << "\r\n\r\n" << Request.Body;
		return 0;
	}
	if (Count == 3)
	{
		const FStageResult Result = FStageRequest::Read(std::atoi(Arguments[1]), Arguments[2]);
		const char* Names[] = {"allocated", "retry", "failed"};
		std::cout << Names[static_cast<int>(Result.Outcome)] << " " << Result.StageID << "\n";
		return 0;
	}
	CheckTheId();
	std::cout << "ok\n";
	return 0;
}
