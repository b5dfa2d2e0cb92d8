// What an Unreal editor module needs to use Tidemark's stages: the hierarchical id, and the request that allocates one.
//
// Plain C++17, so that it compiles with and without the engine. With it, fill an IHttpRequest from FStageRequest and give
// its response to FStageRequest::Read; the ids work as keys of a TMap as they are. TestStage.cpp is a program that uses it all.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

/// Stage -> act -> prop. Act 0 names a prop, prop 0 names an act.
struct FStageHierarchicalId
{
	std::int32_t StageID = 0;
	std::int32_t ActID = 0;
	std::int32_t PropID = 0;

	static FStageHierarchicalId OfProp(std::int32_t Stage, std::int32_t Prop) { return {Stage, 0, Prop}; }
	static FStageHierarchicalId OfAct(std::int32_t Stage, std::int32_t Act) { return {Stage, Act, 0}; }

	bool operator==(const FStageHierarchicalId& Other) const
	{
		return StageID == Other.StageID && ActID == Other.ActID && PropID == Other.PropID;
	}
	bool operator!=(const FStageHierarchicalId& Other) const { return !(*this == Other); }

	/// As the service writes it: {101, 0, 1}.
	std::string ToString() const
	{
		return "{" + std::to_string(StageID) + ", " + std::to_string(ActID) + ", " + std::to_string(PropID) + "}";
	}

	/// Nothing if the text is no key in exactly this form.
	static std::optional<FStageHierarchicalId> Parse(const std::string& Text)
	{
		FStageHierarchicalId Id;
		if (std::sscanf(Text.c_str(), "{%d, %d, %d}", &Id.StageID, &Id.ActID, &Id.PropID) != 3 || Id.ToString() != Text)
		{
			return std::nullopt;
		}
		return Id;
	}
};

/// The hash that a TMap asks for.
inline std::uint32_t GetTypeHash(const FStageHierarchicalId& Id)
{
	// FNV-1a over the three numbers: neighbours must not fall together.
	std::uint32_t Hash = 2166136261u;
	for (const std::int32_t Number : {Id.StageID, Id.ActID, Id.PropID})
	{
		for (int Shift = 0; Shift < 32; Shift += 8)
		{
			Hash = (Hash ^ ((static_cast<std::uint32_t>(Number) >> Shift) & 0xffu)) * 16777619u;
		}
	}
	return Hash;
}

/// The same for the standard library's maps.
template <>
struct std::hash<FStageHierarchicalId>
{
	std::size_t operator()(const FStageHierarchicalId& Id) const noexcept { return GetTypeHash(Id); }
};

/// What became of a request for a stage.
enum class EStageOutcome
{
	/// StageID is the answer, whether it was given now (201) or when the request was sent before (200).
	Allocated,
	/// Send the very same request again: after as many seconds as the response's Retry-After says, or after a moment.
	Retry,
	/// Sending it again won't help. Error says why.
	Failed,
};

struct FStageResult
{
	EStageOutcome Outcome = EStageOutcome::Failed;
	std::int32_t StageID = 0;
	std::string Error;
};

/// The request that allocates a stage. Make one for each stage that a designer creates, keep it until it is answered, and
/// send the same one again when the answer got lost: it never takes a second stage.
struct FStageRequest
{
	/// A new UUID: FGuid::NewGuid().ToString() will do.
	std::string RequestId;

	static constexpr const char* Verb = "POST";
	static constexpr const char* Path = "/stages";
	static constexpr const char* RequestIdHeader = "X-Request-ID";
	static constexpr const char* ContentType = "application/json";
	static constexpr const char* Body = "{}";

	/// What the service's response means.
	static FStageResult Read(int Status, const std::string& ResponseBody)
	{
		FStageResult Result;
		const std::string Member = "\"stage_id\":";
		const std::size_t At = ResponseBody.find(Member);
		int StageID = 0;
		if ((Status == 200 || Status == 201) && At != std::string::npos &&
			std::sscanf(ResponseBody.c_str() + At + Member.size(), "%d", &StageID) == 1)
		{
			Result.Outcome = EStageOutcome::Allocated;
			Result.StageID = StageID;
			return Result;
		}
		Result.Outcome = Status == 409 || Status == 429 || Status >= 500 ? EStageOutcome::Retry : EStageOutcome::Failed;
		Result.Error = "HTTP " + std::to_string(Status) + ": " + ResponseBody;
		return Result;
	}
};
