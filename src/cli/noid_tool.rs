//! `noid-tool`: templates, ids and their numbers, without a server.

use std::{
    io::{self, BufWriter, Write},
    process::ExitCode,
};

use clap::{Args, Parser, Subcommand};

use super::{
    Failure, Outcome,
    lines::{Beside, Lines, is_closed_pipe},
};
use crate::noid::{BadTemplate, CheckScope, Template};

/// Works with noid templates and ids. Lists that are not given are read from stdin, one item on each line.
#[derive(Debug, Parser)]
#[command(name = "noid-tool", version, arg_required_else_help = true)]
pub struct NoidTool {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// Display information about templates. Exits with 1 if one of them is bad.
    Info {
        /// Such as .reeddeeddk, or with a counter .sdd+50
        templates: Vec<String>,
    },
    /// Output the sequence number of each id; -1 for ids that are not of the template.
    Valid {
        #[command(flatten)]
        options: Options,
        #[arg(allow_hyphen_values = true)]
        ids: Vec<String>,
    },
    /// Output the id of each sequence number; nothing for numbers that have none.
    Generate {
        #[command(flatten)]
        options: Options,
        #[arg(allow_hyphen_values = true)]
        numbers: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct Options {
    /// The check character is computed over what follows `ark:/`.
    #[arg(long)]
    ark: bool,
    template: String,
}

impl Options {
    fn template(&self) -> Result<Template, Failure> {
        let (template, _) =
            Template::parse(&self.template).map_err(|bad| Failure(format!("{}: {bad}", self.template)))?;
        let scope = if self.ark { CheckScope::Ark } else { CheckScope::Whole };
        template.with_check_scope(scope).map_err(|problem| Failure(format!("{}: --ark: {problem}", self.template)))
    }
}

impl NoidTool {
    pub fn run(self) -> Outcome {
        let mut code = ExitCode::SUCCESS;
        let done = match self.mode {
            Mode::Info { templates } => print_for_each(templates, |text, out| {
                let bad = info(text, out);
                if bad {
                    code = ExitCode::FAILURE;
                }
            }),
            Mode::Valid { options, ids } => {
                let template = options.template()?;
                print_for_each(ids, |id, out| valid(&template, id, out))
            }
            Mode::Generate { options, numbers } => {
                let template = options.template()?;
                print_for_each(numbers, |number, out| generate(&template, number, out))
            }
        };
        match done {
            // A reader who has seen enough (`| head`) is no error.
            Err(error) if !is_closed_pipe(&error) => Err(error.into()),
            _ => Ok(code),
        }
    }
}

/// Prints a line for each item of the list, or of stdin if there is none. Whoever waits for an answer gets it at once.
fn print_for_each(list: Vec<String>, mut write: impl FnMut(&[u8], &mut Vec<u8>)) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 18, io::stdout().lock());
    let mut line = Vec::new();
    let mut print = |item: &[u8], out: &mut BufWriter<_>| {
        line.clear();
        write(item, &mut line);
        line.push(b'\n');
        out.write_all(&line)
    };
    if list.is_empty() {
        let mut lines = Lines::of_stdin(Beside::Output);
        while let Some(item) = lines.next()? {
            print(item, &mut out)?;
            if lines.would_wait() {
                out.flush()?;
            }
        }
    } else {
        list.iter().try_for_each(|item| print(item.as_bytes(), &mut out))?;
    }
    out.flush()
}

/// Answers whether the template is bad. Why it is goes to stderr: the line is what others parse.
fn info(text: &[u8], out: &mut Vec<u8>) -> bool {
    let text = String::from_utf8_lossy(text);
    match Template::parse(&text) {
        Ok((template, position)) => {
            let used = template.size().map_or(0.0, |size| position as f64 / size as f64 * 100.0);
            let max = template.size().map_or("-1".to_owned(), |size| size.to_string());
            out.extend_from_slice(format!("{text}\tValid, Pos = {position}, Max = {max}, {used:.2}% used").as_bytes());
            false
        }
        Err(bad) => {
            eprintln!("noid-tool: {text}: {bad}");
            out.extend_from_slice(format!("{text}\tInvalid Template: {}", BadTemplate::TITLE).as_bytes());
            true
        }
    }
}

fn valid(template: &Template, id: &[u8], out: &mut Vec<u8>) {
    match template.number(id) {
        Some(number) => out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes()),
        None => out.extend_from_slice(b"-1"),
    }
    out.push(b'\t');
    out.extend_from_slice(id);
}

fn generate(template: &Template, number: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(number);
    out.push(b'\t');
    if let Some(number) = std::str::from_utf8(number).ok().and_then(|text| text.parse().ok()) {
        template.write_id(number, out);
    }
}
