//! A server that lives no longer than we do.

use std::{
    fs::File,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{Doing, EmbeddedError, Result};

/// A running child. Dropping it kills it; [`Child::stop`] is the polite way.
pub struct Child {
    name: &'static str,
    process: std::process::Child,
    log: PathBuf,
    /// What asks it to stop in good order.
    stop_signal: Signal,
}

impl Child {
    /// Starts the command with its output in a file. It gets the stop signal when we die, however we die.
    pub fn spawn(name: &'static str, mut command: Command, log: PathBuf, stop_signal: Signal) -> Result<Self> {
        let open = || File::options().create(true).append(true).open(&log);
        let output = open().doing(|| format!("opening {}", log.display()))?;
        let errors = output.try_clone().doing(|| format!("opening {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        // A group of its own: Ctrl-C is for us, and we stop the servers after the last request.
        command.process_group(0);
        #[cfg(target_os = "linux")]
        // SAFETY: the closure runs between fork and exec and makes one system call, which is safe there.
        unsafe {
            command.pre_exec(move || nix::sys::prctl::set_pdeathsig(stop_signal).map_err(Into::into));
        }
        let process = spawn_from_lasting_thread(command).doing(|| format!("starting {name}"))?;
        #[cfg(not(target_os = "linux"))]
        watch_over(process.id(), stop_signal).doing(|| format!("watching over {name}"))?;
        Ok(Self { name, process, log, stop_signal })
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.process.try_wait().doing(|| format!("looking after {}", self.name))
    }

    /// Fails with the end of its log if it has ended already.
    pub fn check(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => {
                let how = match (status.code(), status.signal()) {
                    (Some(code), _) => format!("exit code {code}"),
                    (None, signal) => format!("signal {}", signal.unwrap_or_default()),
                };
                Err(EmbeddedError::new(format!("{} ended ({how}): {}", self.name, self.last_words())))
            }
        }
    }

    /// The last line of its log.
    pub fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("its log is empty").trim();
        format!("{line} (log: {})", self.log.display())
    }

    /// Asks it to stop and waits; kills it if it won't.
    pub fn stop(&mut self, patience: Duration) {
        self.signal(self.stop_signal);
        let deadline = Instant::now() + patience;
        while matches!(self.ended(), Ok(None)) {
            if Instant::now() > deadline {
                tracing::warn!(server = self.name, "did not stop in time and is killed");
                self.kill();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    pub fn signal(&self, signal: Signal) {
        // It may be gone already, which is what we want.
        let _ = kill(Pid::from_raw(self.process.id() as i32), signal);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if matches!(self.ended(), Ok(None)) {
            self.stop(Duration::from_secs(10));
        }
    }
}

/// Linux sends the parent-death signal when the thread that spawned ends, not the process. So one thread that never ends
/// spawns all children.
fn spawn_from_lasting_thread(command: Command) -> std::io::Result<std::process::Child> {
    type Order = (Command, mpsc::Sender<std::io::Result<std::process::Child>>);
    static THREAD: std::sync::LazyLock<mpsc::Sender<Order>> = std::sync::LazyLock::new(|| {
        let (orders, waiting) = mpsc::channel::<Order>();
        let serve = move || {
            for (mut command, reply) in waiting {
                let _ = reply.send(command.spawn());
            }
        };
        std::thread::Builder::new().name("children".into()).spawn(serve).expect("a thread can be started");
        orders
    });
    let (reply, answer) = mpsc::channel();
    THREAD.send((command, reply)).expect("the thread never ends");
    answer.recv().expect("the thread never ends")
}

/// Other systems have no such signal: a shell looks every second whether we are still there.
#[cfg(not(target_os = "linux"))]
fn watch_over(child: u32, stop_signal: Signal) -> std::io::Result<()> {
    let (us, signal) = (std::process::id(), stop_signal as i32);
    let script = format!("while kill -0 {us}; do sleep 1; done; kill -{signal} {child}");
    let mut watcher = Command::new("sh");
    watcher.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    watcher.spawn().map(drop)
}
