//! Lines of stdin or of a file, by the million, with a progress bar where somebody waits for them.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, IsTerminal, Read},
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use serde::de::DeserializeOwned;

use super::Failure;
use crate::api::named;

/// Work that takes less time needs no bar.
const LONG: Duration = Duration::from_secs(1);

/// Looking at the clock for every line would cost more than the line.
const LOOK_EVERY: u64 = 1 << 13;

pub struct Lines {
    input: BufReader<Box<dyn Read>>,
    line: Vec<u8>,
    progress: Progress,
}

impl Lines {
    pub fn of_stdin(beside: Beside) -> Self {
        let stdin = io::stdin();
        let file = stdin.as_fd().try_clone_to_owned().map(File::from);
        let total = file.ok().and_then(|file| size(&file));
        Self::new(Box::new(stdin.lock()), total, beside)
    }

    pub fn of_file(path: &Path, beside: Beside) -> io::Result<Self> {
        let file = File::open(path)?;
        let total = size(&file);
        Ok(Self::new(Box::new(file), total, beside))
    }

    fn new(input: Box<dyn Read>, total: Option<u64>, beside: Beside) -> Self {
        let progress = Progress::new(total, beside);
        Self { input: BufReader::with_capacity(1 << 18, input), line: Vec::new(), progress }
    }

    /// The next line without its end.
    pub fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        let length = self.input.read_until(b'\n', &mut self.line)?;
        if length == 0 {
            self.progress.finish();
            return Ok(None);
        }
        self.progress.add(length as u64);
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }

    /// Whether the next line may be a while.
    pub fn would_wait(&self) -> bool {
        self.input.buffer().is_empty()
    }
}

/// How much there is, if that can be known.
fn size(file: &File) -> Option<u64> {
    let metadata = file.metadata().ok()?;
    metadata.is_file().then_some(metadata.len())
}

pub fn is_closed_pipe(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

/// What a terminal shows while lines are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    Nothing,
    /// On stdout.
    Output,
    /// On stderr.
    AnotherBar,
}

/// A bar on stderr, if that is a terminal.
struct Progress {
    began: Instant,
    total: Option<u64>,
    bytes: u64,
    lines: u64,
    bar: Option<ProgressBar>,
    wanted: bool,
}

impl Progress {
    fn new(total: Option<u64>, beside: Beside) -> Self {
        // Output that goes to the same terminal shows the progress itself.
        let shows_itself = match beside {
            Beside::Nothing => false,
            Beside::Output => io::stdout().is_terminal(),
            Beside::AnotherBar => true,
        };
        let wanted = io::stderr().is_terminal() && !shows_itself;
        Self { began: Instant::now(), total, bytes: 0, lines: 0, bar: None, wanted }
    }

    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.lines += 1;
        if self.wanted && self.lines.is_multiple_of(LOOK_EVERY) && self.began.elapsed() >= LONG {
            let bar = self.bar.get_or_insert_with(|| bar(self.total).with_elapsed(self.began.elapsed()));
            bar.set_position(self.bytes);
            bar.set_message(format!("{} lines", self.lines));
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: Option<u64>) -> ProgressBar {
    let (bar, style) = match total {
        Some(total) => (ProgressBar::new(total), "{wide_bar} {percent} %, {msg}, {eta} left"),
        None => (ProgressBar::no_length(), "{spinner} {bytes}, {msg}, {elapsed}"),
    };
    bar.with_style(ProgressStyle::with_template(style).expect("a valid template"))
}

/// One value of JSON out of a file, or out of stdin.
pub fn json_of<T: DeserializeOwned>(file: Option<&Path>) -> Result<T, Failure> {
    let (name, text) = match file {
        Some(path) => (path.display().to_string(), std::fs::read_to_string(path)),
        None => ("stdin".to_owned(), io::read_to_string(io::stdin())),
    };
    let text = text.map_err(|error| Failure(format!("{name}: {error}")))?;
    named(&mut serde_json::Deserializer::from_str(&text)).map_err(|error| Failure(format!("{name}: {error}")))
}
