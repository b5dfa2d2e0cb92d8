//! Contexts: one file of variables for each deployment that somebody works with, in the form that `up` writes (`DIR/env`).

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use super::Failure;

/// The variables of the context that the arguments or the environment name. They win over the environment: whoever names a
/// context means it.
pub fn variables(arguments: impl IntoIterator<Item = OsString>) -> Result<Vec<(String, String)>, Failure> {
    let Some(name) = named(arguments).or_else(|| env::var("TIDEMARK_CONTEXT").ok()).filter(|name| !name.is_empty())
    else {
        return Ok(Vec::new());
    };
    let path = path(&name)?;
    let text = fs::read_to_string(&path).map_err(|error| {
        Failure(format!("--context {name}: {} can't be read: {error}; there are: {}", path.display(), known()))
    })?;
    parse(&text).map_err(|(line, problem)| Failure(format!("--context {name}: {}:{line}: {problem}", path.display())))
}

/// What follows `--context`. The whole command line is read later, when its defaults from the environment are known.
fn named(arguments: impl IntoIterator<Item = OsString>) -> Option<String> {
    let mut arguments = arguments.into_iter().map(|argument| argument.to_string_lossy().into_owned());
    while let Some(argument) = arguments.next() {
        match argument.strip_prefix("--context") {
            Some("") => return arguments.next(),
            Some(value) if value.starts_with('=') => return Some(value[1..].to_owned()),
            // What follows belongs to somebody else.
            _ if argument == "--" => return None,
            _ => {}
        }
    }
    None
}

/// A path, or a name in the user's own folder.
fn path(name: &str) -> Result<PathBuf, Failure> {
    if name.contains('/') {
        return Ok(name.into());
    }
    let folder = folder().ok_or_else(|| Failure("--context: neither XDG_CONFIG_HOME nor HOME is set".into()))?;
    Ok(folder.join(format!("{name}.env")))
}

fn folder() -> Option<PathBuf> {
    let given = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = given("XDG_CONFIG_HOME").or_else(|| Some(given("HOME")?.join(".config")))?;
    Some(config.join("tidemark"))
}

fn known() -> String {
    let name = |entry: fs::DirEntry| {
        let path = entry.path();
        let is_context = path.extension().is_some_and(|extension| extension == "env");
        is_context.then(|| path.file_stem().map(|stem| stem.to_string_lossy().into_owned())).flatten()
    };
    let folder = folder().unwrap_or_default();
    let mut names: Vec<String> = entries(&folder).filter_map(name).collect();
    names.sort();
    match names.as_slice() {
        [] => format!("none in {}", folder.display()),
        names => names.join(", "),
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Lines such as `export NAME='value'`, as a shell reads them, without what a shell would put in.
fn parse(text: &str) -> Result<Vec<(String, String)>, (usize, &'static str)> {
    let meaningful = |line: &str| !line.is_empty() && !line.starts_with('#');
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| meaningful(line));
    let variable = |(index, line): (usize, &str)| {
        let assigned = line.strip_prefix("export ").unwrap_or(line).trim_start().split_once('=');
        let (name, value) = assigned.ok_or((index + 1, "must read NAME=value"))?;
        let quoted = |quote| value.strip_prefix(quote).map(|rest: &str| rest.strip_suffix(quote));
        let value = match quoted('\'').or_else(|| quoted('"')) {
            Some(Some(inner)) => inner,
            Some(None) => return Err((index + 1, "a quote is not closed")),
            None => value,
        };
        Ok((name.trim().to_owned(), value.to_owned()))
    };
    lines.map(variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_variables_is_read_as_a_shell_reads_it() {
        let text = "# where\nexport NATS_URL='nats://a:b@c'\n\nTIDEMARK_TENANT=acme\nX=\"y z\"\n";
        let expected = [("NATS_URL", "nats://a:b@c"), ("TIDEMARK_TENANT", "acme"), ("X", "y z")];
        assert_eq!(parse(text).unwrap(), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        assert_eq!(parse("A=1\nnonsense").unwrap_err().0, 2);
        assert_eq!(parse("A='1").unwrap_err(), (1, "a quote is not closed"));
    }

    #[test]
    fn the_context_is_found_wherever_it_stands() {
        let find = |line: &str| named(line.split(' ').map(OsString::from));
        assert_eq!(find("tidemark --context a id next").as_deref(), Some("a"));
        assert_eq!(find("tidemark id next k --context=b").as_deref(), Some("b"));
        assert_eq!(find("tidemark id next k"), None);
        assert_eq!(find("tidemark call x -- --context"), None);
    }
}
