//! Identifiers: increment, formatted and snowflake keys, their configuration and their tokens.

mod formatted;
mod given;
mod increment;
mod keys;
mod snowflake;

pub use formatted::{
    FormattedConfig, FormattedIds, FormattedRequest, FormattedSettings, PaddingMode, Part, ResetScope,
};
pub use given::{GivenRequest, GivenTo};
pub use increment::{Ids, IncrementConfig, IncrementRequest, IncrementSettings, Mode};
pub use keys::{ConfigPage, ConfigPageRequest, ConfigSummary, IdType, KeyToken, Verified};
pub use snowflake::{
    LeaseRequest, ReleaseRequest, Released, RenewRequest, SnowflakeConfig, SnowflakeIds, SnowflakeLease,
    SnowflakeRequest, SnowflakeSettings,
};

use super::{NoParameters, operation::operations};

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

    /// The next ids of a formatted key.
    ///
    /// One reading of the clock serves all parts. With an `Idempotency-Key` the same request gets the same ids again.
    formatted = Formatted(key): FormattedRequest => FormattedIds {
        verb: "formatted",
        scope: Mint,
        success: 200,
        routes: [Get "/v1/id/formatted", Post "/v1/id/formatted"],
    }

    /// A worker id, leased, with the layout to mint snowflakes with.
    ///
    /// The holder mints no timestamp before `not_before` and none at or after `expires_at`; so two holders of the same
    /// worker id never mint the same id, whatever their clocks say. An owner is one process: it gets the same lease when
    /// it asks again. Without an owner every call takes a new lease, which lasts long.
    lease_snowflake = LeaseSnowflake(key): LeaseRequest => SnowflakeLease {
        verb: "snowflake.lease",
        scope: Mint,
        success: 200,
        routes: [Get "/v1/id/snowflake", Post "/v1/id/snowflake"],
    }

    /// Keeps a lease for longer. A lease that is lost is a conflict.
    renew_snowflake = RenewSnowflake(key): RenewRequest => SnowflakeLease {
        verb: "snowflake.renew",
        scope: Mint,
        success: 200,
        routes: [Post "/v1/id/snowflake/renew"],
    }

    /// Gives a lease back.
    ///
    /// With `last_timestamp` the worker id can be used again right after it; without, only when the lease has ended.
    release_snowflake = ReleaseSnowflake(key): ReleaseRequest => Released {
        verb: "snowflake.release",
        scope: Mint,
        success: 200,
        routes: [Post "/v1/id/snowflake/release"],
    }

    /// Snowflakes minted here, for callers that can't hold a lease.
    next_snowflakes = NextSnowflakes(key): SnowflakeRequest => SnowflakeIds {
        verb: "snowflake.next",
        scope: Mint,
        success: 200,
        routes: [Get "/v1/id/snowflake/next", Post "/v1/id/snowflake/next"],
    }

    /// Makes an increment key, or changes it.
    ///
    /// What is not given has its default, also in a change. The first id is one `delta` above `base`. A `base` above the
    /// mark jumps forward; one below it is refused, because ids would repeat; the same `base` again moves nothing.
    set_increment = SetIncrement(key): IncrementSettings => IncrementConfig {
        verb: "config.set-increment",
        scope: Operator,
        success: 200,
        routes: [Post "/v1/config/increment"],
    }

    /// An increment key with its mark.
    get_increment = GetIncrement(key): NoParameters => IncrementConfig {
        verb: "config.get-increment",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/config/increment"],
    }

    /// Makes a formatted key, or changes it.
    ///
    /// A change keeps the counters. Once an id was given, the number base, the padding and the scope of the counter can't
    /// change, because ids could repeat. Parts that could repeat an id by themselves are refused.
    set_formatted = SetFormatted(key): FormattedSettings => FormattedConfig {
        verb: "config.set-formatted",
        scope: Operator,
        success: 200,
        routes: [Post "/v1/config/formatted"],
    }

    /// A formatted key, with a sample that spends nothing.
    get_formatted = GetFormatted(key): NoParameters => FormattedConfig {
        verb: "config.get-formatted",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/config/formatted"],
    }

    /// Makes a snowflake key, or changes its name.
    ///
    /// The sizes add up to 64 bits. Once a lease was given, the layout can't change.
    set_snowflake = SetSnowflake(key): SnowflakeSettings => SnowflakeConfig {
        verb: "config.set-snowflake",
        scope: Operator,
        success: 200,
        routes: [Post "/v1/config/snowflake"],
    }

    /// A snowflake key, with the leases that are live.
    get_snowflake = GetSnowflake(key): NoParameters => SnowflakeConfig {
        verb: "config.get-snowflake",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/config/snowflake"],
    }

    /// All keys of all types, in the order of their names.
    list_configs = ListConfigs(): ConfigPageRequest => ConfigPage {
        verb: "config.list",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/config/list"],
    }

    /// Says that the admin token is right.
    verify_admin = VerifyAdmin(): NoParameters => Verified {
        verb: "token.verify",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/auth/verify"],
    }

    /// The token that opens one key over HTTP.
    ///
    /// Asked again soon, it is the same token.
    get_token = GetToken(key): NoParameters => KeyToken {
        verb: "token.get",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/auth/token"],
    }

    /// A new token for a key. The ones before it open nothing any more.
    reset_token = ResetToken(key): NoParameters => KeyToken {
        verb: "token.reset",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/auth/tokenreset", Post "/v1/auth/tokenreset"],
    }

    /// Who was given a number.
    ///
    /// Instances reserve numbers in ranges, and callers who come together share one write. Each of those leaves a record
    /// with the instance and the request that caused it. The newest ten thousand records of a counter are kept.
    given = Given(key): GivenRequest => GivenTo {
        verb: "given",
        scope: Operator,
        success: 200,
        routes: [Get "/v1/id/given"],
    }
}
