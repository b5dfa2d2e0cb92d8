//! The real servers.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

use sqlx::{Connection, PgConnection, PgPool};
use tidemark::{
    database::{MIGRATIONS, migrate},
    embedded::{Durability, NatsServer, Postgres, free_port},
};
use tokio::sync::OnceCell;

use super::Deployment;

/// Accounts of the shared nats-server; one test takes one.
const ACCOUNTS: usize = 340;

/// One nats-server and one PostgreSQL.
pub struct Servers {
    pub nats: NatsServer,
    pub postgres: Postgres,
    taken: AtomicUsize,
    migrated: OnceCell<()>,
}

/// A database that is only copied: quicker than to migrate one for each test.
const TEMPLATE: &str = "migrated";

impl Servers {
    /// The ones that all tests share. They end with the process.
    pub async fn shared() -> &'static Servers {
        static SHARED: OnceCell<Servers> = OnceCell::const_new();
        SHARED.get_or_init(|| Servers::start("shared")).await
    }

    /// Ones that a test has for itself and may kill.
    pub async fn start(name: &str) -> Self {
        Self::start_with(name, Durability::Fast).await
    }

    /// The same, of which a crash may cost something or nothing.
    pub async fn start_with(name: &str, durability: Durability) -> Self {
        let folder = folder().join(name);
        let ports = (free_port(0, "").unwrap(), free_port(0, "").unwrap());
        let (nats_folder, postgres_folder, accounts) = (folder.join("nats"), folder.join("postgres"), accounts());
        let (nats, postgres) = tokio::join!(
            NatsServer::start(&nats_folder, ports.0, &accounts),
            Postgres::start(&postgres_folder, ports.1, "a-password", durability),
        );
        Self { nats: nats.unwrap(), postgres: postgres.unwrap(), taken: AtomicUsize::new(0), migrated: OnceCell::new() }
    }

    /// A deployment in which nothing is.
    pub async fn deployment(&self) -> Deployment {
        let number = self.take();
        self.postgres.create_database(&database(number)).await.unwrap();
        self.numbered(number)
    }

    /// One whose database is migrated.
    pub async fn migrated_deployment(&self) -> Deployment {
        self.migrated.get_or_init(|| self.make_template()).await;
        let number = self.take();
        let mut connection = PgConnection::connect(&self.postgres.url()).await.unwrap();
        let copy = format!("create database {} template {TEMPLATE}", database(number));
        sqlx::raw_sql(sqlx::AssertSqlSafe(copy)).execute(&mut connection).await.unwrap();
        self.numbered(number)
    }

    async fn make_template(&self) {
        self.postgres.create_database(TEMPLATE).await.unwrap();
        let template = PgPool::connect(&self.postgres.url_of(TEMPLATE)).await.unwrap();
        migrate(&template, &MIGRATIONS).await.unwrap();
        template.close().await;
    }

    fn take(&self) -> usize {
        let number = self.taken.fetch_add(1, Ordering::Relaxed);
        assert!(number < ACCOUNTS, "more tests than accounts: raise ACCOUNTS");
        number
    }

    fn numbered(&self, number: usize) -> Deployment {
        Deployment {
            account: account(number),
            nats_url: format!("nats://test{number}:secret@127.0.0.1:{}", self.nats.port),
            database_url: self.postgres.url_of(&database(number)),
            monitor_url: self.nats.monitor_url(),
        }
    }
}

fn database(number: usize) -> String {
    format!("test_{number}")
}

fn account(number: usize) -> String {
    format!("TEST{number}")
}

fn accounts() -> String {
    let configured = |number| {
        let account = account(number);
        format!("  {account}: {{ jetstream: enabled, users: [{{ user: test{number}, password: secret }}] }}\n")
    };
    format!("accounts {{\n{}}}\n", (0..ACCOUNTS).map(configured).collect::<String>())
}

/// A folder of this run. What earlier runs left behind goes first.
pub fn folder() -> PathBuf {
    let parent = std::env::temp_dir();
    let ours = |number: u32| parent.join(format!("tidemark-it-{number}"));
    for entry in std::fs::read_dir(&parent).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_prefix("tidemark-it-").and_then(|number| number.parse::<i32>().ok());
        let gone = |number| nix::sys::signal::kill(nix::unistd::Pid::from_raw(number), None).is_err();
        if number.is_some_and(gone) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    let folder = ours(std::process::id());
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
