//! Who calls, and whether he may.
//!
//! Over HTTP a credential decides: the admin token, an API key from the registry, or a token for one id key. Over NATS the
//! server has decided by the subject, and nothing in here is asked. Unknown is refused; what can't be checked yet is
//! "unavailable", never "no".

mod tokens;

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa::ToSchema;

pub use tokens::{Claim, Tokens};

use crate::{
    api::{Info, Name, Scope, Surface},
    clock::Clock,
    config,
    error::{Code, Error, Result},
    registry::{Registry, keys::ApiKey},
};

/// The tenant that exists without being made.
pub const DEFAULT_TENANT: &str = "default";

/// What an API key may do. Callers know these as roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Grant {
    /// Takes ids from keys, pools and stages.
    Mint,
    /// Sets and reads its tenant's timers.
    Timers,
    /// Writes and reads its tenant's usage records.
    Usage,
    /// Sees the secrets that its tenant's timers carry.
    Secrets,
    /// Administers its own tenant; with the default tenant, the whole deployment.
    Admin,
    /// Rewrites usage records older than the backfill window.
    Elevated,
}

impl Grant {
    pub const ALL: &'static [Grant] =
        &[Grant::Mint, Grant::Timers, Grant::Usage, Grant::Secrets, Grant::Admin, Grant::Elevated];
}

/// A caller whose credentials were checked.
#[derive(Debug, Clone)]
pub enum Caller {
    /// Has the admin token.
    Admin,
    Key(ApiKey),
    /// Has a token of one id key.
    Token(Claim),
}

impl Caller {
    /// Whether he may call the operation at all.
    pub fn may(&self, operation: &Info) -> Result<()> {
        match self.has(operation.scope, operation.surface) {
            true => Ok(()),
            false => Err(Error::new(Code::Forbidden, "these credentials do not allow this operation")),
        }
    }

    pub fn has(&self, scope: Scope, surface: Surface) -> bool {
        match (self, scope) {
            (Caller::Admin, _) => true,
            (Caller::Key(key), Scope::Operator) => {
                key.tenant.as_str() == DEFAULT_TENANT && key.roles.contains(&Grant::Admin)
            }
            (Caller::Key(key), Scope::Mint) => key.roles.contains(&Grant::Mint),
            (Caller::Key(key), Scope::Timers) => key.roles.contains(&Grant::Timers),
            (Caller::Key(key), Scope::Secrets) => key.roles.contains(&Grant::Secrets),
            (Caller::Key(_), Scope::Key) => true,
            (Caller::Key(key), Scope::Usage) => key.roles.contains(&Grant::Usage),
            (Caller::Key(key), Scope::Elevated) => key.roles.contains(&Grant::Elevated),
            (Caller::Key(key), Scope::Tenant) => key.roles.contains(&Grant::Admin),
            (Caller::Token(_), scope) => scope == Scope::Mint && surface == Surface::Ids,
        }
    }

    /// Whose things he sees: his key's tenant.
    pub fn tenant(&self) -> Name {
        match self {
            Caller::Key(key) => key.tenant.clone(),
            Caller::Admin | Caller::Token(_) => DEFAULT_TENANT.parse().expect("a valid name"),
        }
    }

    /// What his usage records come from: his key's source.
    pub fn source(&self) -> Result<Name> {
        match self {
            Caller::Key(key) => key.source.clone().ok_or_else(|| {
                Error::new(Code::SourceNotAuthorized, "this API key has no source, so it can't send usage records")
            }),
            Caller::Admin | Caller::Token(_) => Ok(DEFAULT_TENANT.parse().expect("a valid name")),
        }
    }

    /// The one user for whom he may speak.
    pub fn user(&self) -> Option<&str> {
        match self {
            Caller::Key(key) => key.user.as_deref(),
            Caller::Admin | Caller::Token(_) => None,
        }
    }

    /// A tenant that he names, if it is one that he may name. Of others he does not even learn whether they exist.
    pub fn named_tenant(&self, tenant: Name) -> Result<Name> {
        match self.has(Scope::Operator, Surface::Native) || self.tenant() == tenant {
            true => Ok(tenant),
            false => Err(Error::new(Code::NotFound, format!("there is no tenant {tenant} for these credentials"))),
        }
    }

    /// Whether he may call it on this target.
    pub fn may_reach(&self, target: &[Name]) -> Result<()> {
        match self {
            Caller::Token(Claim { key, .. }) if target != std::slice::from_ref(key) => {
                Err(Error::new(Code::Forbidden, format!("this token opens {key} only")))
            }
            _ => Ok(()),
        }
    }

    /// Tells callers apart, however they spell their credentials.
    pub fn fingerprint(&self) -> Hash {
        match self {
            Caller::Admin => hash("admin"),
            Caller::Key(key) => key.hash,
            Caller::Token(Claim { key, generation }) => hash(&format!("{key}.{generation}")),
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Caller::Admin => f.write_str("admin token"),
            Caller::Key(ApiKey { tenant, source, user, .. }) => {
                write!(f, "key of {tenant}")?;
                source.iter().try_for_each(|source| write!(f, ", source {source}"))?;
                user.iter().try_for_each(|user| write!(f, ", user {user}"))
            }
            Caller::Token(Claim { key, .. }) => write!(f, "token of {key}"),
        }
    }
}

/// Checks credentials against the configured ones and the registry.
pub struct Gate {
    admin_token: Option<Hash>,
    /// The one key that stands in the configuration.
    configured_key: Option<(Hash, ApiKey)>,
    tokens: Option<Tokens>,
    registry: Registry,
    clock: Clock,
}

type Hash = [u8; 32];

/// Keys and tokens carry enough randomness that a plain hash can't be searched; it makes them safe to keep, and equally
/// long to compare.
pub fn hash(secret: &str) -> Hash {
    Sha256::digest(secret.as_bytes()).into()
}

impl Gate {
    pub fn new(auth: &config::Auth, registry: Registry, clock: Clock) -> Self {
        let hashed = |secret: &config::Secret| hash(secret.expose());
        Self {
            admin_token: auth.admin_token.as_ref().map(hashed),
            configured_key: auth.api_key.as_ref().map(|key| (hashed(key), ApiKey::configured(hashed(key)))),
            tokens: Tokens::new(auth),
            registry,
            clock,
        }
    }

    /// The caller behind a credential. Without one, or with a wrong one, there is no caller.
    pub fn identify(&self, credential: Option<&str>) -> Result<Caller> {
        let Some(credential) = credential else {
            return Err(Error::new(Code::Unauthenticated, "credentials are missing"));
        };
        let presented = hash(credential);
        if let Some(token) = &self.admin_token
            && bool::from(token.ct_eq(&presented))
        {
            return Ok(Caller::Admin);
        }
        if let Some((configured, key)) = &self.configured_key
            && bool::from(configured.ct_eq(&presented))
        {
            return Ok(Caller::Key(key.clone()));
        }
        self.registry.ready()?;
        match ApiKey::id_in(credential).and_then(|id| self.registry.keys.get(id).record) {
            Some(key) if bool::from(key.hash.ct_eq(&presented)) => Ok(Caller::Key(ApiKey::clone(&key))),
            _ => match self.opened_by(credential) {
                Some(claim) => Ok(Caller::Token(claim)),
                None => Err(Error::new(Code::Unauthenticated, "credentials are not valid")),
            },
        }
    }

    /// The id key that a token opens. A generation that we have not heard of yet is one that we made elsewhere just now.
    fn opened_by(&self, token: &str) -> Option<Claim> {
        let claim = self.tokens.as_ref()?.verify(token, self.clock.now())?;
        let known = self.registry.ids.get(claim.key.as_str()).record.map_or(0, |record| record.token_generation);
        (claim.generation >= known).then_some(claim)
    }
}
