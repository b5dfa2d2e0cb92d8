//! All integration tests, in one binary: one link step, and one nats-server and one PostgreSQL for the whole run.
//!
//! Every test has a NATS account and a database of its own, so they run side by side and see the real names of subjects
//! and streams.

mod support;

mod access;
mod backup;
mod bench_command;
mod commands;
mod deploy;
mod examples;
mod formatted;
mod halves;
mod id_command;
mod ids_table;
mod increment;
mod noid;
mod noid_minting;
mod noid_tool;
mod noid_vectors;
mod recovery;
mod snowflake;
mod stage_command;
mod stage_contents;
mod stage_limits;
mod stages;
mod start;
mod streams;
mod surfaces;
mod timer_callbacks;
mod timer_command;
mod timer_extras;
mod timer_promises;
mod timers;
mod tokens;
mod tour;
mod uniqueness;
mod unreal;
mod up;
mod usage;
mod usage_backfill;
mod usage_command;
mod usage_corrections;
mod usage_counters;
mod usage_emitter;
mod usage_feed;
mod usage_historical;
mod usage_limits;
mod usage_promises;
mod usage_quarantine;
mod usage_query;
mod usage_retention;
mod usage_units;
mod watermark;
mod wire;
