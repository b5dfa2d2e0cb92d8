//! API keys: made, listed, revoked. Only their hashes are kept.

use chrono::{DateTime, Utc};
use rand::distr::{Alphanumeric, SampleString};
use serde::{Deserialize, Serialize};

use super::{Record, Registry, Row};
use crate::{
    access::{self, DEFAULT_TENANT, Grant},
    api::{
        Call, Context, Handle, Name,
        admin::{CreateKey, CreatedKey, KeyList, KeySummary, ListKeys, RevokeKey},
    },
    clock::Clock,
    error::{Code, Error, Result},
    usage::SourceRecord,
};

/// A key reads `tmk_<id>_<secret>`: recognisable in a leak scan, and its id leads to its record.
const PREFIX: &str = "tmk_";
const ID_LENGTH: usize = 12;
const SECRET_LENGTH: usize = 40;

/// An API key as the registry has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ApiKey {
    pub hash: [u8; 32],
    pub tenant: Name,
    pub source: Option<Name>,
    pub user: Option<String>,
    pub roles: Vec<Grant>,
    pub created_at: DateTime<Utc>,
}

impl Record for ApiKey {
    const TABLE: &'static str = "key";
}

impl ApiKey {
    /// The id inside a key, if it looks like one of ours.
    pub fn id_in(key: &str) -> Option<&str> {
        key.strip_prefix(PREFIX)?.split_once('_').map(|(id, _)| id)
    }

    /// The one that stands in the configuration: the default tenant, every role.
    pub fn configured(hash: [u8; 32]) -> Self {
        Self {
            hash,
            tenant: DEFAULT_TENANT.parse().expect("a valid name"),
            source: Some(DEFAULT_TENANT.parse().expect("a valid name")),
            user: None,
            roles: Grant::ALL.to_vec(),
            created_at: DateTime::UNIX_EPOCH,
        }
    }

    fn summary(&self, id: &Name) -> KeySummary {
        KeySummary {
            id: id.clone(),
            tenant: self.tenant.clone(),
            source: self.source.clone(),
            user: self.user.clone(),
            roles: self.roles.clone(),
            created_at: self.created_at,
        }
    }
}

/// A new key: its id and its full text.
pub fn generate() -> (Name, String) {
    let mut random = rand::rng();
    let id = Alphanumeric.sample_string(&mut random, ID_LENGTH);
    let secret = Alphanumeric.sample_string(&mut random, SECRET_LENGTH);
    let key = format!("{PREFIX}{id}_{secret}");
    (id.parse().expect("letters and digits are a name"), key)
}

/// Answers the operations on keys.
pub struct Keys {
    registry: Registry,
    clock: Clock,
}

impl Keys {
    pub fn new(registry: Registry, clock: Clock) -> Self {
        Self { registry, clock }
    }

    /// Makes sure that a key that exists elsewhere (in `up`'s data folder) is known. Repeating it changes nothing.
    pub async fn ensure(&self, key: &str, tenant: Name, source: Name, roles: Vec<Grant>) -> Result<()> {
        let id: Name = ApiKey::id_in(key).ok_or_else(|| Error::invalid("not an API key"))?.parse()?;
        let hash = access::hash(key);
        let Row { record, revision } = self.registry.keys.get(id.as_str());
        match record {
            Some(known) if known.hash == hash && known.tenant == tenant && known.roles == roles => return Ok(()),
            None if revision > 0 => {
                tracing::warn!(%id, %tenant, "an API key of this data folder was revoked and stays so");
                return Ok(());
            }
            _ => {}
        }
        self.know_source(&source).await?;
        let created_at = self.clock.now();
        let record = ApiKey { hash, tenant, source: Some(source), user: None, roles, created_at };
        self.registry.store(&id, &record, revision).await
    }
}

impl Keys {
    /// A source that has a key is registered, and stays so when the key goes.
    async fn know_source(&self, source: &Name) -> Result<()> {
        let Row { record, revision } = self.registry.find(&self.registry.sources, source).await?;
        if record.is_some() {
            return Ok(());
        }
        let made = self.registry.store(source, &SourceRecord { created_at: self.clock.now() }, revision).await;
        // Somebody else was first.
        made.or_else(|error| if error.code == Code::Conflict { Ok(()) } else { Err(error) })
    }
}

impl Handle<CreateKey> for Keys {
    async fn handle(&self, call: Call<CreateKey>) -> Result<CreatedKey> {
        let wanted = call.request;
        if wanted.roles.is_empty() {
            return Err(Error::field("roles", "must name at least one role"));
        }
        wanted.user.as_deref().map_or(Ok(()), |user| Context::check_text("user", user))?;
        if let Some(source) = &wanted.source {
            self.know_source(source).await?;
        }
        let (id, key) = generate();
        let record = ApiKey {
            hash: access::hash(&key),
            tenant: wanted.tenant,
            source: wanted.source,
            user: wanted.user,
            roles: wanted.roles,
            created_at: self.clock.now(),
        };
        self.registry.store(&id, &record, 0).await?;
        Ok(CreatedKey { id, key })
    }
}

impl Handle<ListKeys> for Keys {
    async fn handle(&self, _: Call<ListKeys>) -> Result<KeyList> {
        self.registry.ready()?;
        let mut keys: Vec<KeySummary> = self.registry.keys.all().iter().map(|(id, key)| key.summary(id)).collect();
        keys.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(KeyList { keys })
    }
}

impl Handle<RevokeKey> for Keys {
    async fn handle(&self, call: Call<RevokeKey>) -> Result<KeySummary> {
        self.registry.ready()?;
        let id = call.request.id;
        let Row { record: Some(key), revision } = self.registry.keys.get(id.as_str()) else {
            return Err(Error::new(Code::NotFound, format!("no API key has the id {id}")));
        };
        self.registry.remove::<ApiKey>(&id, revision).await?;
        Ok(key.summary(&id))
    }
}
