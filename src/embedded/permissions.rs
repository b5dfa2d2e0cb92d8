//! NATS users with real permissions, written into the server's configuration.
//!
//! Access is granted on subjects: what a caller writes into a header or a body grants nothing.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::{
    api::{self, Name, Operation, Scope},
    jetstream::declarations,
};

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
    /// Ourselves: may do everything.
    pub service: User,
    /// The operator, who is the default tenant too.
    pub operator: User,
    pub tenants: Vec<(Name, User)>,
}

impl Callers {
    /// The `authorization` block. Nobody else gets in.
    pub fn configuration(&self) -> String {
        let mut users = vec![entry(&self.service, json!({ "publish": ">", "subscribe": ">" }))];
        users.push(entry(&self.operator, self.operator_rights()));
        users.extend(self.tenants.iter().map(|(tenant, user)| entry(user, self.tenant_rights(tenant))));
        let mut text = String::from("authorization {\n  users: [\n");
        for user in users {
            // JSON is a dialect that the server's configuration understands.
            writeln!(text, "    {user}").expect("writing to a string");
        }
        text.push_str("  ]\n}\n");
        text
    }

    /// All request subjects, looking at JetStream, and streams that are not ours.
    fn operator_rights(&self) -> Value {
        let prefix = &self.prefix;
        let mut denied = Vec::new();
        for declaration in declarations(prefix, 1) {
            let stream = declaration.name();
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
            "usage.default.*".into(),
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

    /// Its own usage, and what takes ids. It hears its own events and replies, and nobody else's.
    fn tenant_rights(&self, tenant: &Name) -> Value {
        struct Minting<'a>(&'a Name, Vec<String>);
        impl api::Visitor for Minting<'_> {
            fn visit<O: Operation>(&mut self) {
                if O::INFO.scope == Scope::Mint {
                    self.1.push(O::INFO.pattern(self.0));
                }
            }
        }
        let mut minting = Minting(&self.prefix, vec![format!("usage.{tenant}.*")]);
        api::visit(&mut minting);
        let heard = [
            format!("{}.event.*.{tenant}.>", self.prefix),
            format!("usage-rejected.{tenant}.>"),
            format!("_INBOX_{tenant}.>"),
        ];
        json!({ "publish": minting.1, "subscribe": heard })
    }
}

fn entry(user: &User, permissions: Value) -> Value {
    json!({ "user": user.name, "password": user.password, "permissions": permissions })
}
