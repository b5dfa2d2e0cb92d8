//! Tidemark: identifiers, stage numbers, timers and a usage ledger for other services, over NATS and HTTP.
//!
//! A map of the house. A request's way is one straight line, from top to bottom and back:
//!
//! - [`http`] and [`nats`] are the transports. They decode, authenticate and answer, and know no domain rule.
//! - [`api`] declares every operation once: request, response, subject, routes, scope. Both transports, the [`client`],
//!   the OpenAPI document and the permissions that `up` writes come from it.
//! - [`gateway`] finds the code that answers an operation: in this process, or over NATS in another.
//! - [`ids`], [`noid`], [`stages`], [`timers`] and [`usage`] answer. Domain modules know no transport and not each other.
//! - [`watermark`] counts: compare-and-set, group commit, ranges, leases, idempotent answers. [`snowflake`] mints ids with
//!   a leased number, here and in the [`client`]. `gathering` takes all who wait for one write.
//! - [`registry`] is what every instance must know at once, held in memory; [`access`] decides who may call.
//! - [`events`] publishes facts that others may follow. [`sliding_log`] and `limiter` limit what one caller may ask for.
//! - [`jetstream`] and [`database`] are the two stores: connecting, `streams/`, `migrations/`.
//!
//! Around it: [`server`] puts a process together, [`embedded`] starts nats-server and PostgreSQL for `tidemark up` and
//! for the tests, [`instance`] is this process among its like, [`doctor`] tells what is wrong, [`bench`] how fast it is,
//! [`backup`] saves both stores and puts them back, [`cli`] is the command line. [`config`], [`error`], [`clock`], [`roles`]
//! and [`telemetry`] are what everybody uses.

pub mod access;
pub mod api;
pub mod backup;
pub mod bench;
pub mod cli;
pub mod client;
pub mod clock;
pub mod config;
pub mod database;
pub mod doctor;
pub mod embedded;
pub mod error;
pub mod events;
pub mod gateway;
mod gathering;
mod hex;
pub mod http;
pub mod ids;
pub mod instance;
pub mod jetstream;
mod limiter;
pub mod nats;
pub mod noid;
mod per_name;
pub mod registry;
pub mod roles;
mod schema;
pub mod server;
pub mod sliding_log;
pub mod snowflake;
pub mod stages;
pub mod telemetry;
pub mod timers;
mod turns;
pub mod usage;
pub mod watermark;

/// Compiles the README's code.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
