//! `tidemark noid`: pools of a running deployment.

use std::path::{Path, PathBuf};

use clap::Subcommand;

use super::{
    Failure,
    lines::{Beside, Lines, json_of},
    print, print_json, print_row, print_to_reader,
};
use crate::{
    api::{
        Context, IdempotencyKey, Name, NoParameters,
        noid::{
            Count, ExcludedPage, IdToValidate, LowWater, MOST_EXCLUDED, MOST_MINTED, MintNoids, NewPool, OneId, Pool,
            PoolState, SomeIds,
        },
    },
    client::Client,
    noid::{CheckScope, Template},
};

/// Bytes of ids in one request: a message of NATS has a megabyte.
const MOST_BYTES: usize = 500_000;

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make a pool.
    Create {
        pool: Name,
        /// Such as .reeddeeddk; with a counter, such as .sdd+50, the pool begins there
        template: String,
        /// Announce the pool as low when no more ids than this are left.
        #[arg(long, value_name = "IDS")]
        low_water: Option<u64>,
        /// Compute the check character over what follows `ark:/`.
        #[arg(long)]
        ark: bool,
    },
    /// List all pools, oldest first.
    List,
    /// Show a pool.
    Info { pool: Name },
    /// Mint ids, any number of them. Fewer come where the pool ends.
    Mint {
        pool: Name,
        #[arg(default_value_t = 1)]
        n: u64,
        /// Get the same ids again when this is repeated. For up to 1000 ids.
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<IdempotencyKey>,
    },
    /// Show the next ids without spending them.
    Peek {
        pool: Name,
        #[arg(default_value_t = 1)]
        n: i64,
    },
    /// Open a pool for minting.
    Open { pool: Name },
    /// Close a pool.
    Close { pool: Name },
    /// Move a pool past an id that is in use already, and all before it.
    Advance { pool: Name, id: String },
    /// Read a dump of ids that are in use, one on each line, and move the pool past the last of them in its order.
    Import {
        pool: Name,
        /// Stdin if not given
        file: Option<PathBuf>,
        /// Only say where the pool would be moved to.
        #[arg(long)]
        dry_run: bool,
    },
    /// Read ids that are in use, one on each line, and take exactly these out of the pool.
    Exclude {
        pool: Name,
        /// Stdin if not given
        file: Option<PathBuf>,
    },
    /// Tell the number of an id in the pool's order; -1 if it is not of the pool.
    Validate {
        pool: Name,
        id: String,
        /// Hyphens mean nothing.
        #[arg(long)]
        lenient: bool,
    },
    /// Set when a pool counts as low; without a number, never.
    LowWater { pool: Name, ids: Option<u64> },
    /// Print a pool's whole state as JSON. Close the pool first if it is to be moved.
    Export { pool: Name },
    /// Make a pool from an exported state, under this name.
    Restore {
        pool: Name,
        /// Stdin if not given
        file: Option<PathBuf>,
    },
}

pub async fn converse(client: &Client, verb: Verb, json: bool) -> Result<(), Failure> {
    let nothing = &NoParameters {};
    match verb {
        Verb::Create { pool, template, low_water, ark } => {
            let check_scope = if ark { CheckScope::Ark } else { CheckScope::Whole };
            let made = client.create_pool(&pool, &NewPool { template, low_water, check_scope }).await?;
            show(&made, json)
        }
        Verb::List => show_ids(&client.list_pools(nothing).await?, json),
        Verb::Info { pool } => show(&client.pool_info(&pool, nothing).await?, json),
        Verb::Mint { pool, n, idempotency_key: Some(key) } => {
            let context = Context { idempotency_key: Some(key), ..Default::default() };
            let count = Count { n: Some(n.try_into().unwrap_or(i64::MAX)) };
            show_ids(&client.call_with::<MintNoids>(&pool, &count, &context).await?, json)
        }
        Verb::Mint { pool, n, idempotency_key: None } => mint(client, &pool, n, json).await,
        Verb::Peek { pool, n } => show_ids(&client.peek_noids(&pool, &Count { n: Some(n) }).await?, json),
        Verb::Open { pool } => show(&client.open_pool(&pool, nothing).await?, json),
        Verb::Close { pool } => show(&client.close_pool(&pool, nothing).await?, json),
        Verb::Advance { pool, id } => show(&client.advance_pool(&pool, &OneId { id }).await?, json),
        Verb::Import { pool, file, dry_run } => import(client, &pool, file.as_deref(), dry_run, json).await,
        Verb::Exclude { pool, file } => exclude(client, &pool, file.as_deref(), json).await,
        Verb::Validate { pool, id, lenient } => {
            let validity = client.validate_noid(&pool, &IdToValidate { id, lenient }).await?;
            if json { print_json(&validity) } else { print(validity.number) }
        }
        Verb::LowWater { pool, ids } => show(&client.set_low_water(&pool, &LowWater { low_water: ids }).await?, json),
        Verb::Export { pool } => print_json(&export(client, &pool).await?),
        Verb::Restore { pool, file } => show(&restore(client, &pool, file.as_deref()).await?, json),
    }
}

/// Prints ids as they come, so that what was minted is known even if a later request fails, and mints no more than are read.
async fn mint(client: &Client, pool: &Name, n: u64, json: bool) -> Result<(), Failure> {
    let mut left = n;
    let mut all = Vec::new();
    loop {
        let wanted = left.min(MOST_MINTED as u64);
        let ids = client.mint_noids(pool, &Count { n: Some(wanted as i64) }).await?;
        left -= ids.len() as u64;
        let ended = left == 0 || (ids.len() as u64) < wanted;
        if json {
            all.extend(ids);
        } else if !ids.is_empty() && !print_to_reader(ids.join("\n"))? {
            return Ok(());
        }
        if ended {
            return if json { print_json(&all) } else { Ok(()) };
        }
    }
}

async fn import(client: &Client, pool: &Name, file: Option<&Path>, dry_run: bool, json: bool) -> Result<(), Failure> {
    let before = client.pool_info(pool, &NoParameters {}).await?;
    let template = template(&before)?;
    let (mut lines, mut foreign, mut last) = (0_u64, 0_u64, None);
    let mut dump = open(file)?;
    while let Some(id) = dump.next()? {
        lines += 1;
        match template.number(id) {
            Some(number) => last = last.max(Some(number)),
            None => foreign += 1,
        }
    }
    let Some(number) = last else {
        return Err(Failure(format!("none of the {lines} lines is an id of {}", before.template)));
    };
    let id = template.id(number).ok_or_else(|| Failure("the last id has no number".into()))?;
    eprintln!("{lines} lines, {foreign} of them no ids of this pool; the last id is {id} with the number {number}");
    if dry_run {
        return Ok(());
    }
    show(&client.advance_pool(pool, &OneId { id }).await?, json)
}

async fn exclude(client: &Client, pool: &Name, file: Option<&Path>, json: bool) -> Result<(), Failure> {
    let mut lines = open(file)?;
    let (mut ids, mut bytes, mut after, mut done) = (Vec::new(), 0, None, 0);
    loop {
        let line = lines.next()?.map(|line| String::from_utf8_lossy(line).into_owned());
        let ended = line.is_none();
        bytes += line.as_ref().map_or(0, String::len);
        ids.extend(line.filter(|line| !line.is_empty()));
        if ids.len() == MOST_EXCLUDED || bytes > MOST_BYTES || (ended && !ids.is_empty()) {
            let count = ids.len();
            let some = SomeIds { ids: std::mem::take(&mut ids), numbers: Vec::new() };
            let excluded = client.exclude_noids(pool, &some).await;
            after = Some(excluded.map_err(|error| Failure(format!("behind the first {done} ids: {error}")))?);
            done += count;
            bytes = 0;
        }
        if ended {
            break;
        }
    }
    show(&after.ok_or_else(|| Failure("there are no ids".into()))?, json)
}

async fn export(client: &Client, pool: &Name) -> Result<PoolState, Failure> {
    let mut state = client.export_pool(pool, &ExcludedPage::default()).await?;
    while let Some(excluded_from) = state.next {
        let page = client.export_pool(pool, &ExcludedPage { excluded_from }).await?;
        state.excluded.extend(page.excluded);
        state.next = page.next;
    }
    Ok(state)
}

/// The pool opens only when everything is excluded that must be.
async fn restore(client: &Client, pool: &Name, file: Option<&Path>) -> Result<Pool, Failure> {
    let mut state: PoolState = json_of(file)?;
    let excluded = std::mem::take(&mut state.excluded);
    let opens = !std::mem::replace(&mut state.closed, true);
    let mut made = client.import_pool(pool, &state).await?;
    for numbers in excluded.chunks(MOST_EXCLUDED) {
        made = client.exclude_noids(pool, &SomeIds { ids: Vec::new(), numbers: numbers.to_vec() }).await?;
    }
    if opens {
        made = client.open_pool(pool, &NoParameters {}).await?;
    }
    Ok(made)
}

fn template(pool: &Pool) -> Result<Template, Failure> {
    let (template, _) = Template::parse(&pool.template)?;
    template.with_check_scope(pool.check_scope.unwrap_or_default()).map_err(|problem| Failure(problem.into()))
}

fn open(file: Option<&Path>) -> Result<Lines, Failure> {
    match file {
        Some(path) => Lines::of_file(path, Beside::Nothing).map_err(|error| unreadable(path, &error)),
        None => Ok(Lines::of_stdin(Beside::Nothing)),
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure(format!("{}: {error}", path.display()))
}

fn show_ids(ids: &[String], json: bool) -> Result<(), Failure> {
    if json { print_json(&ids) } else { ids.iter().try_for_each(print) }
}

fn show(pool: &Pool, json: bool) -> Result<(), Failure> {
    if json {
        return print_json(pool);
    }
    let Pool { name, template, used, max, closed, last_mint, created, remaining, excluded, low_water, check_scope } =
        pool;
    print_row("name", name)?;
    print_row("template", template)?;
    print_row("used", used)?;
    match remaining {
        Some(left) => {
            print_row("max", max)?;
            print_row("remaining", left)?;
        }
        None => print_row("remaining", &"no end")?,
    }
    if let Some(excluded) = excluded {
        print_row("excluded", excluded)?;
    }
    if let Some(low_water) = low_water {
        print_row("low water", low_water)?;
    }
    if check_scope.is_some() {
        print_row("check", &"over what follows ark:/")?;
    }
    print_row("state", if *closed { &"closed" } else { &"open" })?;
    print_row("last mint", last_mint)?;
    print_row("created", created)
}
