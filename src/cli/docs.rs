//! `tidemark docs`: the tables of operations in the documentation, from their declarations.

use std::{fmt::Write, fs, path::PathBuf, process::ExitCode};

use clap::Args;

use super::{Failure, Outcome, print};
use crate::api::{self, Info, Name, Operation, Scope};

/// The pages, and the service that each is about.
const PAGES: [(&str, &str); 6] = [
    ("ids.md", "id"),
    ("noid.md", "noid"),
    ("stages.md", "stage"),
    ("timers.md", "timer"),
    ("usage.md", "usage"),
    ("security.md", "admin"),
];

const BEGIN: &str = "<!-- operations: begin -->\n";
const END: &str = "<!-- operations: end -->";

#[derive(Debug, Args)]
pub struct Options {
    /// Where the pages are
    #[arg(default_value = "docs")]
    folder: PathBuf,
    /// Change nothing, and fail if a page is not up to date.
    #[arg(long)]
    check: bool,
}

pub fn run(options: &Options) -> Outcome {
    let mut stale = Vec::new();
    for (page, service) in PAGES {
        let path = options.folder.join(page);
        let failed = |problem: String| Failure(format!("{}: {problem}", path.display()));
        let text = fs::read_to_string(&path).map_err(|error| failed(error.to_string()))?;
        let current = with_table(&text, &table(service)).ok_or_else(|| failed("has no table of operations".into()))?;
        if current != text {
            stale.push(page);
            if !options.check {
                fs::write(&path, current).map_err(|error| failed(error.to_string()))?;
            }
        }
    }
    match options.check && !stale.is_empty() {
        true => Err(Failure(format!("{} must be made anew: make docs", stale.join(", ")))),
        false => {
            print(format_args!("{} pages, {} of them changed", PAGES.len(), stale.len()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn with_table(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{table}{END}{after}"))
}

/// A row for each operation of a service.
fn table(service: &str) -> String {
    struct Rows<'a> {
        service: &'a str,
        prefix: Name,
        text: String,
    }
    impl api::Visitor for Rows<'_> {
        fn visit<O: Operation>(&mut self) {
            let info = &O::INFO;
            if info.service == self.service {
                let (subject, routes) = (subject(info, &self.prefix), routes(info));
                let _ = writeln!(self.text, "| {} | `{subject}` | {routes} | {} |", info.summary(), who(info.scope));
            }
        }
    }
    let head = "| | NATS | HTTP | for whom |\n|---|---|---|---|\n".to_owned();
    let mut rows = Rows { service, prefix: "tm".parse().expect("a name"), text: head };
    api::visit(&mut rows);
    rows.text
}

fn subject(info: &Info, prefix: &Name) -> String {
    let names: String = info.target.iter().map(|name| format!(".<{name}>")).collect();
    format!("{prefix}.{}.{}{names}", info.service, info.verb)
}

fn routes(info: &Info) -> String {
    let route = |route: &api::Route| format!("`{} {}`", route.method.as_str(), route.path);
    info.routes.iter().map(route).collect::<Vec<_>>().join("<br>")
}

fn who(scope: Scope) -> &'static str {
    match scope {
        Scope::Operator => "the operator",
        Scope::Mint => "role `mint`",
        Scope::Timers => "role `timers`",
        Scope::Secrets => "role `secrets`",
        Scope::Key => "any key",
        Scope::Usage => "role `usage`",
        Scope::Elevated => "role `elevated`",
        Scope::Tenant => "the tenant's `admin`",
    }
}
