//! PostgreSQL on loopback, with a password.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    time::Duration,
};

use nix::sys::signal::Signal;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tokio::time::Instant;

use super::{Child, Doing, EmbeddedError, Result, find, unprivileged::Unprivileged};

const USER: &str = "tidemark";
const DATABASE: &str = "tidemark";

/// How long a start may take, recovery after a crash included.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether a commit waits for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    Synced,
    /// For tests that don't pull the plug.
    Fast,
}

/// A running PostgreSQL.
pub struct Postgres {
    child: Child,
    binaries: PathBuf,
    cluster: PathBuf,
    log: PathBuf,
    runs_as: Option<Unprivileged>,
    durability: Durability,
    password: String,
    pub port: u16,
}

impl Postgres {
    /// Starts it in a folder, which is made into a cluster if it is none yet.
    pub async fn start(folder: &Path, port: u16, password: &str, durability: Durability) -> Result<Self> {
        let (folder, password) = (folder.to_owned(), password.to_owned());
        let prepare = move || Self::prepare(&folder, port, password, durability);
        let mut postgres = tokio::task::spawn_blocking(prepare).await.expect("the preparation does not panic")?;
        postgres.wait().await?;
        postgres.create_database(DATABASE).await?;
        Ok(postgres)
    }

    fn prepare(folder: &Path, port: u16, password: String, durability: Durability) -> Result<Self> {
        let runs_as = Unprivileged::needed()?;
        let cluster = place(folder, runs_as.as_ref())?;
        let made_by = std::fs::read_to_string(cluster.join("PG_VERSION")).ok();
        let major = made_by.as_deref().and_then(|text| text.trim().parse().ok());
        let binaries = find::postgres(major)?;
        if made_by.is_none() {
            init(&binaries, &cluster, runs_as.as_ref(), &password)?;
        }
        let log = cluster.with_extension("log");
        let child = spawn(&binaries, &cluster, &log, port, runs_as.as_ref(), durability)?;
        Ok(Self { child, binaries, cluster, log, runs_as, durability, password, port })
    }

    /// The address of one of its databases.
    pub fn url_of(&self, database: &str) -> String {
        format!("postgres://{USER}:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    pub fn url(&self) -> String {
        self.url_of(DATABASE)
    }

    pub async fn create_database(&self, name: &str) -> Result<()> {
        let failed = |error: sqlx::Error| EmbeddedError::new(format!("creating the database {name}: {error}"));
        let mut connection = PgConnection::connect(&self.url_of("postgres")).await.map_err(failed)?;
        let exists: bool = sqlx::query_scalar("select exists (select from pg_database where datname = $1)")
            .bind(name)
            .fetch_one(&mut connection)
            .await
            .map_err(failed)?;
        if !exists {
            // A name can't be a parameter; ours are letters, digits and underscores.
            let statement = sqlx::AssertSqlSafe(format!("create database \"{name}\""));
            sqlx::query(statement).execute(&mut connection).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Starts it again after a stop or a kill, on the same port and data.
    pub async fn restart(&mut self) -> Result<()> {
        self.child = self.spawn()?;
        self.wait().await
    }

    pub fn stop(&mut self) {
        self.child.stop(Duration::from_secs(20));
    }

    pub fn kill(&mut self) {
        self.child.kill();
    }

    fn spawn(&self) -> Result<Child> {
        spawn(&self.binaries, &self.cluster, &self.log, self.port, self.runs_as.as_ref(), self.durability)
    }

    /// After a crash, leftovers of the old processes may hold the lock for a moment. That is waited out.
    async fn wait(&mut self) -> Result<()> {
        let options = PgConnectOptions::from_str(&self.url_of("postgres")).expect("a valid address");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Err(ended) = self.child.check() {
                if !self.was_locked_out() || Instant::now() > deadline {
                    return Err(ended);
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
                self.child = self.spawn()?;
            }
            match PgConnection::connect_with(&options).await {
                Ok(connection) => {
                    let _ = connection.close().await;
                    return Ok(());
                }
                Err(error) if is_wrong_password(&error) => {
                    let folder = self.cluster.display();
                    return Err(EmbeddedError::new(format!(
                        "the PostgreSQL in {folder} has another password than ours"
                    )));
                }
                Err(error) if Instant::now() > deadline => {
                    return Err(EmbeddedError::new(format!("PostgreSQL is not ready after {PATIENCE:?}: {error}")));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(25)).await,
            }
        }
    }

    fn was_locked_out(&self) -> bool {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rev().take(5).any(|line| line.contains("lock file") || line.contains("still in use"))
    }
}

fn is_wrong_password(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("28P01"))
}

/// The cluster's folder. It stands where it is wanted, unless we are root and the user that PostgreSQL runs as can't get
/// there (below /root, say): then the wanted place is a link to one where he can.
fn place(wanted: &Path, runs_as: Option<&Unprivileged>) -> Result<PathBuf> {
    let make = |folder: &Path| std::fs::create_dir_all(folder).doing(|| format!("making {}", folder.display()));
    let Some(user) = runs_as else {
        make(wanted)?;
        return Ok(wanted.to_owned());
    };
    let cluster = match wanted.read_link() {
        Ok(elsewhere) => elsewhere,
        Err(_) if user.can_reach(wanted) => wanted.to_owned(),
        Err(_) => {
            let elsewhere = Path::new("/var/lib/tidemark").join(uuid::Uuid::new_v4().to_string()).join("postgres");
            make(&elsewhere)?;
            std::os::unix::fs::symlink(&elsewhere, wanted).doing(|| format!("linking {}", wanted.display()))?;
            elsewhere
        }
    };
    make(&cluster)?;
    user.own(&cluster)?;
    Ok(cluster)
}

fn init(binaries: &Path, cluster: &Path, runs_as: Option<&Unprivileged>, password: &str) -> Result<()> {
    let password_file = cluster.with_extension("password");
    super::up::write_private(&password_file, password)?;
    if let Some(user) = runs_as {
        user.own(&password_file)?;
    }
    let mut initdb = command(binaries, "initdb", runs_as);
    initdb.args(["--encoding=UTF8", "--locale=C", "--auth=scram-sha-256", "--username", USER, "--pgdata"]);
    initdb.arg(cluster).arg("--pwfile").arg(&password_file);
    let output = initdb.output().doing(|| "starting initdb".into())?;
    let _ = std::fs::remove_file(&password_file);
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("error")).or_else(|| text.lines().last()).unwrap_or_default();
    Err(EmbeddedError::new(format!("initdb failed in {}: {line}", cluster.display())))
}

fn spawn(
    binaries: &Path,
    cluster: &Path,
    log: &Path,
    port: u16,
    runs_as: Option<&Unprivileged>,
    durability: Durability,
) -> Result<Child> {
    // The server insists on it, and a copied folder may have lost it.
    std::fs::set_permissions(cluster, std::fs::Permissions::from_mode(0o700))
        .doing(|| format!("closing {} to others", cluster.display()))?;
    let mut postgres = command(binaries, "postgres", runs_as);
    postgres.arg("-D").arg(cluster).args(["-p", &port.to_string()]);
    let mut settings = vec!["listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=300"];
    if durability == Durability::Fast {
        settings.extend(["fsync=off", "synchronous_commit=off", "full_page_writes=off"]);
    }
    for setting in settings {
        postgres.args(["-c", setting]);
    }
    // SIGINT is a fast shutdown: connections are cut, nothing is lost.
    Child::spawn("PostgreSQL", postgres, log.to_owned(), Signal::SIGINT)
}

fn command(binaries: &Path, name: &str, runs_as: Option<&Unprivileged>) -> Command {
    let mut command = Command::new(binaries.join(name));
    // Our own folder may be closed to the other user.
    command.current_dir("/").env("LC_ALL", "C");
    if let Some(user) = runs_as {
        user.drop_to(&mut command);
    }
    command
}
