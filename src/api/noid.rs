//! Noid pools.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, Serialize, de};
use utoipa::ToSchema;

use super::{Name, NoParameters, operation::operations};
use crate::noid::CheckScope;

/// The most ids of one mint.
pub const MOST_MINTED: usize = 1000;

/// The most ids that are excluded at once.
pub const MOST_EXCLUDED: usize = 10_000;

operations! {
    service "noid" on Pools;

    /// The names of all pools, oldest first.
    list_pools = ListPools(): NoParameters => Vec<String> {
        verb: "list",
        scope: Mint,
        success: 200,
        routes: [Get "/pools"],
    }

    /// Makes a pool. Its template can't change later.
    create_pool = CreatePool(name): NewPool => Pool {
        verb: "create",
        scope: Operator,
        success: 201,
        routes: [Post "/pools"],
    }

    /// A pool: what was used of it, and what is left.
    pool_info = GetPool(pool): NoParameters => Pool {
        verb: "info",
        scope: Mint,
        success: 200,
        routes: [Get "/pools/{pool}"],
    }

    /// Opens a pool for minting. An exhausted one stays closed.
    open_pool = OpenPool(pool): NoParameters => Pool {
        verb: "open",
        scope: Operator,
        success: 200,
        routes: [Put "/pools/{pool}/open"],
    }

    /// Closes a pool: it mints nothing until it is opened again.
    close_pool = ClosePool(pool): NoParameters => Pool {
        verb: "close",
        scope: Operator,
        success: 200,
        routes: [Put "/pools/{pool}/close"],
    }

    /// The next ids of a pool. Fewer than asked for where it ends, and none if it is closed. Takes an `Idempotency-Key`.
    mint_noids = MintNoids(pool): Count => Vec<String> {
        verb: "mint",
        scope: Mint,
        success: 200,
        routes: [Post "/pools/{pool}/mint"],
    }

    /// The ids that would be minted next, without spending them.
    peek_noids = PeekNoids(pool): Count => Vec<String> {
        verb: "peek",
        scope: Mint,
        success: 200,
        routes: [Get "/pools/{pool}/peek"],
    }

    /// Moves a pool past an id that is in use already. Everything before it in the pool's order is spent as well.
    advance_pool = AdvancePool(pool): OneId => Pool {
        verb: "advance",
        scope: Operator,
        success: 200,
        routes: [Post "/pools/{pool}/advancePast"],
    }

    /// Takes ids that are in use elsewhere out of a pool, wherever they stand in its order: all of them, or none.
    exclude_noids = ExcludeNoids(pool): SomeIds => Pool {
        verb: "exclude",
        scope: Operator,
        success: 200,
        routes: [Post "/pools/{pool}/exclude"],
    }

    /// Whether an id is one of the pool, and its number in the pool's order.
    validate_noid = ValidateNoid(pool): IdToValidate => Validity {
        verb: "validate",
        scope: Mint,
        success: 200,
        routes: [Get "/pools/{pool}/validate", Post "/pools/{pool}/validate"],
    }

    /// Sets when a pool counts as low, which is announced on `tm.event.noid.low.<pool>`. Nothing means never.
    set_low_water = SetLowWater(pool): LowWater => Pool {
        verb: "low-water",
        scope: Operator,
        success: 200,
        routes: [Put "/pools/{pool}/low_water"],
    }

    /// The whole state of a pool, as `import` takes it. Close the pool before you move it: what is minted later is not in it.
    export_pool = ExportPool(pool): ExcludedPage => PoolState {
        verb: "export",
        scope: Operator,
        success: 200,
        routes: [Get "/pools/{pool}/export"],
    }

    /// Makes a pool from an exported state.
    import_pool = ImportPool(name): PoolState => Pool {
        verb: "import",
        scope: Operator,
        success: 201,
        routes: [Post "/pools/import"],
    }

    /// The version, and how much there is.
    noid_stats = NoidStats(): NoParameters => Statistics {
        verb: "stats",
        scope: Mint,
        success: 200,
        routes: [Get "/stats"],
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPool {
    /// Such as `.reeddeeddk`; with a counter, such as `.sdd+50`, the pool begins there.
    #[serde(default)]
    pub template: String,
    /// The pool counts as low when no more ids than this are left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_water: Option<u64>,
    /// What the check character is computed over: `whole`, or `ark` for what follows `ark:/`.
    #[serde(default)]
    #[schema(inline)]
    pub check_scope: CheckScope,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Count {
    /// How many ids; 1 if not given.
    #[serde(default, deserialize_with = "perhaps_empty", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub n: Option<i64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OneId {
    #[serde(default)]
    pub id: String,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SomeIds {
    /// In a form, one on each line.
    #[serde(default, deserialize_with = "lines", skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<String>,
    /// The same as numbers in the pool's order, as an export has them. Up to 10,000 of both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<u64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IdToValidate {
    #[serde(default)]
    pub id: String,
    /// Hyphens mean nothing, as in ARKs.
    #[serde(default)]
    pub lenient: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LowWater {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_water: Option<u64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExcludedPage {
    /// Excluded numbers from this one on: the `next` of the page before.
    #[serde(default)]
    pub excluded_from: u64,
}

/// A pool, in the words of the noid server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "PascalCase")]
pub struct Pool {
    #[schema(value_type = String)]
    pub name: Name,
    /// The template with its counter.
    pub template: String,
    /// How far the pool has come in its order.
    pub used: u64,
    /// How many ids there are; -1 if there is no end.
    pub max: i64,
    pub closed: bool,
    /// The last time that the pool moved; its creation if it never did.
    pub last_mint: DateTime<Utc>,
    pub created: DateTime<Utc>,
    /// Ids that can still be minted; null if there is no end.
    pub remaining: Option<u64>,
    /// Ids still to come that are excluded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excluded: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_water: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(inline)]
    pub check_scope: Option<CheckScope>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "PascalCase")]
pub struct Validity {
    pub id: String,
    pub valid: bool,
    /// Its number in the pool's order, from 0; -1 if it is not valid.
    pub number: i64,
    /// Whether the pool has come past it: it was minted, or skipped for good.
    pub used: bool,
}

/// A pool's state, to be kept or moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolState {
    /// For the reader. The pool is made under the name of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub name: Option<Name>,
    /// With its counter.
    pub template: String,
    #[serde(default)]
    #[schema(inline)]
    pub check_scope: CheckScope,
    pub closed: bool,
    pub created: DateTime<Utc>,
    pub last_mint: DateTime<Utc>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_water: Option<u64>,
    /// Numbers still to come that are excluded, in their order.
    #[serde(default)]
    pub excluded: Vec<u64>,
    /// Where the excluded numbers go on, if there are more. Such a state is imported closed; `exclude` takes the others, and
    /// then the pool can be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "PascalCase")]
pub struct Statistics {
    /// Tidemark's.
    pub version: String,
    pub pools: u64,
    /// Ids minted by the instance that answers, since it started.
    pub minted: u64,
    pub started: DateTime<Utc>,
}

/// A number that may stand in a form: there, an empty field is one that is not given.
fn perhaps_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a whole number of 64 bits")]
    enum Field {
        Number(i64),
        Text(String),
    }
    match Option::deserialize(deserializer)? {
        None => Ok(None),
        Some(Field::Number(number)) => Ok(Some(number)),
        Some(Field::Text(text)) if text.is_empty() => Ok(None),
        Some(Field::Text(text)) => text
            .parse()
            .map(Some)
            .map_err(|_| de::Error::invalid_value(de::Unexpected::Str(&text), &"a whole number of 64 bits")),
    }
}

/// A list, or a text with one of them on each line.
fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    struct Visitor;
    impl<'de> de::Visitor<'de> for Visitor {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of ids")
        }

        fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
            Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
            Vec::deserialize(de::value::SeqAccessDeserializer::new(list))
        }
    }
    deserializer.deserialize_any(Visitor)
}
