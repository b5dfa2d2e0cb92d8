//! The declaration of an operation.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

use super::{Name, Request, Scope, Surface, Target};

/// One thing that can be asked, declared by [`operations!`].
pub trait Operation: Send + Sync + 'static {
    type Target: Target;
    type Request: Request;
    type Response: Serialize + DeserializeOwned + ToSchema + Send + Sync;
    /// What is called instead, over HTTP, for a caller who has [`Info::privilege`]: what a role opens has a subject of its own.
    type Privileged: Operation<Target = Self::Target, Request = Self::Request, Response = Self::Response>;
    const INFO: Info;

    /// The HTTP status of an answer.
    fn status(answer: &Self::Response) -> u16 {
        if Self::is_repeated(answer) { Self::INFO.repeated } else { Self::INFO.success }
    }

    /// Whether an answer was given before. The body is the same then; the HTTP status or a header of the reply tells it.
    fn is_repeated(_answer: &Self::Response) -> bool {
        false
    }

    /// Notes that it was.
    fn repeat(_answer: &mut Self::Response) {}
}

/// What a declaration says besides its types.
#[derive(Debug)]
pub struct Info {
    /// The service's token in the subject.
    pub service: &'static str,
    /// The rest of the subject before the target; may have several tokens.
    pub verb: &'static str,
    /// The target's names, as HTTP parameters are called.
    pub target: &'static [&'static str],
    pub scope: Scope,
    pub surface: Surface,
    /// The HTTP status of success.
    pub success: u16,
    /// The same for an answer that was given before.
    pub repeated: u16,
    /// The same for an answer that says that the work is yet to be done.
    pub deferred: u16,
    /// The same for an answer that shows what would be done.
    pub preview: Option<u16>,
    /// What a success is called, where answers come in an envelope.
    pub message: &'static str,
    /// The role that opens [`Operation::Privileged`].
    pub privilege: Option<Scope>,
    /// Whether one client address may only call it so often over HTTP.
    pub limited_by_client: bool,
    /// A header that a request over HTTP must have.
    pub header: Option<&'static str>,
    pub routes: &'static [Route],
    /// The documentation: its first line is the summary.
    pub about: &'static str,
}

#[derive(Debug)]
pub struct Route {
    pub method: Method,
    pub path: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
    Put,
    Patch,
    Delete,
}

impl Method {
    pub fn as_str(self) -> &'static str {
        match self {
            Method::Get => "GET",
            Method::Post => "POST",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
            Method::Delete => "DELETE",
        }
    }
}

impl Info {
    /// `id.increment`: how logs, metrics and documents call it.
    pub fn name(&self) -> String {
        format!("{}.{}", self.service, self.verb)
    }

    /// The subject with a wildcard for each name of the target: `tm.id.increment.*`.
    pub fn pattern(&self, prefix: &Name) -> String {
        format!("{prefix}.{}.{}{}", self.service, self.verb, ".*".repeat(self.target.len()))
    }

    /// The subject of one target: `tm.id.increment.orders`.
    pub fn subject(&self, prefix: &Name, target: &impl Target) -> String {
        let mut subject = format!("{prefix}.{}.{}", self.service, self.verb);
        for name in target.names() {
            subject.push('.');
            subject.push_str(name.as_str());
        }
        subject
    }

    /// The first line of the documentation, to the end of its last sentence.
    pub fn summary(&self) -> String {
        let mut lines = self.about.trim().lines().map(str::trim);
        let mut summary = lines.next().unwrap_or_default().to_owned();
        while !summary.ends_with('.')
            && let Some(more) = lines.next().filter(|line| !line.is_empty())
        {
            summary.push(' ');
            match more.split_once(". ") {
                Some((end, _)) => summary.extend([end, "."]),
                None => summary.push_str(more),
            }
        }
        summary
    }
}

/// A request that says nothing besides the target.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// Something that is to see every operation with its types.
pub trait Visitor {
    fn visit<O: Operation>(&mut self);
}

/// Declares the operations of one service: the type, its subject and routes, and the client's method. An operation with a
/// status for repeated answers has a member `repeated` in its response, which is not sent; one with a status for deferred
/// answers has a response that says whether it `is_deferred`, and with one for previews whether it `is_preview`.
macro_rules! operations {
    (
        service $service:literal on $surface:ident;
        $(
            $(#[doc = $about:literal])+
            $method:ident = $operation:ident($($target:ident),*) : $request:ty => $response:ty {
                verb: $verb:literal,
                scope: $scope:ident,
                success: $success:literal,
                $(repeated: $repeated:literal,)?
                $(deferred: $deferred:literal, $(preview: $preview:literal,)?)?
                $(message: $message:literal,)?
                $(limited_by_client: $limited:literal,)?
                $(header: $header:literal,)?
                $(privileged: $privilege:ident $privileged:ident,)?
                routes: [$($http:ident $path:literal),* $(,)?],
            }
        )+
    ) => {
        $(
            $(#[doc = $about])+
            pub struct $operation;

            impl $crate::api::Operation for $operation {
                type Target = operations!(@target $($target)*);
                type Request = $request;
                type Response = $response;
                type Privileged = operations!(@type $($privileged)? $operation);
                const INFO: $crate::api::Info = $crate::api::Info {
                    service: $service,
                    verb: $verb,
                    target: &[$(stringify!($target)),*],
                    scope: $crate::api::Scope::$scope,
                    surface: $crate::api::Surface::$surface,
                    success: $success,
                    repeated: operations!(@or $($repeated)? $success),
                    deferred: operations!(@or $($deferred)? $success),
                    preview: operations!(@option $($($preview)?)?),
                    message: operations!(@or $($message)? "success"),
                    privilege: operations!(@scope $($privilege)?),
                    limited_by_client: operations!(@or $($limited)? false),
                    header: operations!(@option $($header)?),
                    routes: &[$($crate::api::Route { method: $crate::api::Method::$http, path: $path }),*],
                    about: concat!($($about, "\n"),+),
                };

                $(
                    fn is_repeated(answer: &$response) -> bool {
                        const { assert!($repeated != $success) };
                        answer.repeated
                    }

                    fn repeat(answer: &mut $response) {
                        answer.repeated = true;
                    }
                )?

                $(
                    fn status(answer: &$response) -> u16 {
                        $(
                            if answer.is_preview() {
                                return $preview;
                            }
                        )?
                        if answer.is_deferred() { $deferred } else { $success }
                    }
                )?
            }

            impl $crate::client::Client {
                $(#[doc = $about])+
                pub async fn $method(
                    &self,
                    $($target: &$crate::api::Name,)*
                    request: &$request,
                ) -> $crate::error::Result<$response> {
                    self.call::<$operation>(&operations!(@value $($target)*), request).await
                }
            }
        )+

        /// Shows this service's operations to the visitor.
        pub fn visit(visitor: &mut impl $crate::api::Visitor) {
            $(visitor.visit::<$operation>();)+
        }
    };
    (@or $first:literal $second:literal) => { $first };
    (@or $second:literal) => { $second };
    (@type $first:ident $second:ident) => { $first };
    (@type $second:ident) => { $second };
    (@scope) => { None };
    (@scope $scope:ident) => { Some($crate::api::Scope::$scope) };
    (@option) => { None };
    (@option $value:literal) => { Some($value) };
    (@target) => { () };
    (@target $name:ident) => { $crate::api::Name };
    (@target $first:ident $second:ident) => { ($crate::api::Name, $crate::api::Name) };
    (@value) => { () };
    (@value $name:ident) => { $name.clone() };
    (@value $first:ident $second:ident) => { ($first.clone(), $second.clone()) };
}
pub(super) use operations;
