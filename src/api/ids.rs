//! Identifiers.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Name, operation::operations};

operations! {
    service "id" on Ids;

    /// The next ids of an increment key.
    ///
    /// Every id is larger than the ones before it in the same answer, and no id is given twice. With an
    /// `Idempotency-Key` the same request gets the same ids again.
    increment = Increment(key): IncrementRequest => Ids {
        verb: "increment",
        scope: Mint,
        success: 200,
        routes: [Get "/v1/id/increment", Post "/v1/id/increment"],
    }

    /// Makes an increment key, or changes it.
    ///
    /// The first id is `base + 1`. A `base` above the mark jumps forward; one below it is refused, because ids would
    /// repeat; the same `base` again changes nothing.
    set_increment = SetIncrement(key): IncrementSettings => IncrementConfig {
        verb: "config.set-increment",
        scope: Operator,
        success: 200,
        routes: [Post "/v1/config/increment"],
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IncrementRequest {
    /// How many ids, 1 to 1000. One if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000)]
    pub size: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ids {
    /// The ids, in growing order.
    pub id: Vec<i64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IncrementSettings {
    /// Where counting starts: the first id is one above.
    #[schema(minimum = 0)]
    pub base: i64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IncrementConfig {
    #[schema(value_type = String)]
    pub key: Name,
    pub base: i64,
    /// The mark: never below the last id given. Ids up to it may be reserved by instances.
    pub current: i64,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}
