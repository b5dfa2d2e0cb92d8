//! API keys.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Name, operation::operations};
use crate::access::Grant;

operations! {
    service "admin" on Native;

    /// Makes an API key. Its secret is shown this once; only a hash is kept.
    create_key = CreateKey(): NewKey => CreatedKey {
        verb: "key-create",
        scope: Operator,
        success: 201,
        routes: [Post "/v1/admin/keys"],
    }

    /// All API keys, without their secrets, oldest first.
    list_keys = ListKeys(): ListKeysRequest => KeyList {
        verb: "key-list",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/admin/keys"],
    }

    /// Revokes an API key, everywhere at once.
    revoke_key = RevokeKey(): RevokeKeyRequest => KeySummary {
        verb: "key-revoke",
        scope: Operator,
        success: 200,
        routes: [Delete "/v1/admin/keys/{id}"],
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewKey {
    #[schema(value_type = String)]
    pub tenant: Name,
    /// The source that usage records sent with this key belong to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub source: Option<Name>,
    /// Binds the key to one user of the tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    pub roles: Vec<Grant>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreatedKey {
    #[schema(value_type = String)]
    pub id: Name,
    /// The key itself, for `X-API-Key` or `Authorization: Bearer`. It is not shown again.
    pub key: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ListKeysRequest {}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KeyList {
    pub keys: Vec<KeySummary>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevokeKeyRequest {
    #[schema(value_type = String)]
    pub id: Name,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct KeySummary {
    #[schema(value_type = String)]
    pub id: Name,
    #[schema(value_type = String)]
    pub tenant: Name,
    #[schema(value_type = Option<String>)]
    pub source: Option<Name>,
    pub user: Option<String>,
    pub roles: Vec<Grant>,
    pub created_at: DateTime<Utc>,
}
