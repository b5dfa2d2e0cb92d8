//! NATS accounts and users with real permissions, written into the server's configuration.
//!
//! Access is granted on subjects: what a caller writes into a header or a body grants nothing. Every tenant has an account
//! of its own, into which exactly what it may call and hear is imported. A permission alone would not be enough: the
//! server checks the subject that somebody publishes to but not the reply subject that he names, and it acknowledges
//! stored messages itself, so an acknowledgement could be written over a counter. A reply that leaves an account arrives in
//! the one that asked, where there is no counter.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::api::{self, Name, Operation, Scope};

/// Where we, the operator and all streams live.
const ACCOUNT: &str = "tidemark";

/// A user and the password that it connects with.
#[derive(Debug, Clone)]
pub struct User {
    pub name: String,
    pub password: String,
}

impl User {
    pub fn url(&self, port: u16) -> String {
        format!("nats://{}:{}@127.0.0.1:{port}", self.name, self.password)
    }
}

/// Everyone who connects to the server of `up`.
#[derive(Debug)]
pub struct Callers {
    pub prefix: Name,
    pub inbox_prefix: Name,
    /// Where usage events are published.
    pub usage: Name,
    /// The names of our streams, which the operator must leave alone.
    pub streams: Vec<String>,
    /// Ourselves: may do everything.
    pub service: User,
    /// The operator, who is the default tenant too.
    pub operator: User,
    pub tenants: Vec<(Name, User)>,
}

impl Callers {
    /// The `accounts` block. Nobody else gets in.
    pub fn configuration(&self) -> String {
        let ours = [
            entry(&self.service, json!({ "publish": ">", "subscribe": ">" })),
            entry(&self.operator, self.operator_rights()),
        ];
        let (mut services, mut streams, mut tenants) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
        for (tenant, user) in &self.tenants {
            let name = format!("tenant-{tenant}");
            let (called, heard) = (self.called_by(tenant), self.heard_by(tenant));
            services.extend(called.iter().cloned());
            streams.extend(heard.iter().cloned());
            let from_us = |subject: &String| json!({ "account": ACCOUNT, "subject": subject });
            let imports: Vec<Value> = called
                .iter()
                .map(|subject| json!({ "service": from_us(subject) }))
                .chain(heard.iter().map(|subject| json!({ "stream": from_us(subject) })))
                .collect();
            let hears: Vec<String> = heard.into_iter().chain([format!("_INBOX_{tenant}.>")]).collect();
            let user = entry(user, json!({ "publish": called, "subscribe": hears }));
            tenants.push((name, json!({ "users": [user], "imports": imports })));
        }
        let exports: Vec<Value> = services
            .iter()
            .map(|subject| json!({ "service": subject }))
            .chain(streams.iter().map(|subject| json!({ "stream": subject })))
            .collect();
        let mut accounts = json!({ ACCOUNT: { "jetstream": "enabled", "users": ours, "exports": exports } });
        for (name, account) in tenants {
            accounts[name] = account;
        }
        // JSON is a dialect that the server's configuration understands.
        format!("accounts: {accounts:#}\n")
    }

    /// All request subjects, looking at JetStream, and streams that are not ours.
    fn operator_rights(&self) -> Value {
        let prefix = &self.prefix;
        let mut denied = Vec::new();
        for stream in &self.streams {
            for call in ["CREATE", "UPDATE", "DELETE", "PURGE", "RESTORE", "SNAPSHOT", "MSG.GET", "MSG.DELETE"] {
                denied.push(format!("$JS.API.STREAM.{call}.{stream}"));
            }
            for call in ["STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "DIRECT.GET", "CONSUMER.CREATE"] {
                denied.push(format!("$JS.API.{call}.{stream}"));
            }
            for call in ["DIRECT.GET", "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.DELETE"] {
                denied.push(format!("$JS.API.{call}.{stream}.>"));
            }
            denied.push(format!("$JS.API.CONSUMER.MSG.NEXT.{stream}.>"));
            if let Some(bucket) = stream.strip_prefix("KV_") {
                denied.push(format!("$KV.{bucket}.>"));
            }
        }
        let allowed = [
            format!("{prefix}.>"),
            format!("{}.default.*", self.usage),
            "$SRV.>".into(),
            "$JS.API.>".into(),
            "$JS.ACK.>".into(),
            "$KV.>".into(),
        ];
        json!({
            "publish": { "allow": allowed, "deny": denied },
            "subscribe": { "allow": [">"], "deny": [format!("{}.>", self.inbox_prefix)] },
            "allow_responses": true,
        })
    }

    /// Its own usage and timers, and what takes ids.
    fn called_by(&self, tenant: &Name) -> Vec<String> {
        struct Called<'a> {
            prefix: &'a Name,
            tenant: &'a Name,
            subjects: Vec<String>,
        }
        impl api::Visitor for Called<'_> {
            fn visit<O: Operation>(&mut self) {
                let pattern = O::INFO.pattern(self.prefix);
                match O::INFO.scope {
                    Scope::Mint => self.subjects.push(pattern),
                    // The tenant stands first.
                    Scope::Timers | Scope::Secrets | Scope::Key | Scope::Usage | Scope::Tenant => {
                        self.subjects.push(pattern.replacen('*', self.tenant.as_str(), 1));
                    }
                    Scope::Elevated | Scope::Operator => {}
                }
            }
        }
        let subjects = vec![format!("{}.{tenant}.*", self.usage)];
        let mut called = Called { prefix: &self.prefix, tenant, subjects };
        api::visit(&mut called);
        called.subjects
    }

    /// Its own events, and what was refused of its own.
    fn heard_by(&self, tenant: &Name) -> [String; 2] {
        [format!("{}.event.*.{tenant}.>", self.prefix), format!("{}-rejected.{tenant}.>", self.usage)]
    }
}

fn entry(user: &User, permissions: Value) -> Value {
    json!({ "user": user.name, "password": user.password, "permissions": permissions })
}
