//! What can be asked: every operation's request, response, subject, routes and scope, declared once.
//!
//! A declaration (see [`operations!`]) is a type that implements [`Operation`]. From it come the NATS endpoint
//! ([`crate::nats`]), the HTTP route ([`crate::http`]), the client's method ([`crate::client`]), the OpenAPI document
//! and the permissions that `up` writes. The domain modules implement [`Handle`] for it and know no transport.

mod call;
mod encoding;
mod json;
mod name;
mod operation;
mod request;
mod scope;

pub mod admin;
pub mod ids;
pub mod noid;
pub mod stages;
pub mod timers;
pub mod usage;

pub use call::{Call, Context, Handle, IdempotencyKey, ReplyHeaders};
pub use encoding::{Encoding, named, unpacking};
pub(crate) use json::Members;
pub use json::{Json, altered};
pub use name::{Name, Target};
pub use operation::{Info, Method, NoParameters, Operation, Route, Visitor};
pub use request::{Request, WholeBody};
pub use scope::{Scope, Surface};

/// Shows every operation to the visitor, in the order of the documentation.
pub fn visit(visitor: &mut impl Visitor) {
    ids::visit(visitor);
    noid::visit(visitor);
    stages::visit(visitor);
    timers::visit(visitor);
    usage::visit(visitor);
    admin::visit(visitor);
}
