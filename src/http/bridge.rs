//! From a route to its operation and back.

use std::{collections::HashMap, sync::Arc};

use axum::{
    Router,
    body::{Body, HttpBody, to_bytes},
    extract::{Path, Request, State, rejection::PathRejection},
    http::{HeaderMap, HeaderName, HeaderValue},
    response::Response,
    routing::{MethodFilter, on},
};

use super::{App, Ready, dialect, edge::Client, params::Params, text};
use crate::{
    api::{
        self, Call, Context, Encoding, IdempotencyKey, Info, Method, Name, Operation, ReplyHeaders, Request as _,
        Surface, Target,
    },
    error::{Code, Error, Result},
    telemetry::Trace,
};

/// The targets that a credential has.
pub const TENANT: &str = "tenant";
pub const SOURCE: &str = "source";

/// The routes of every declaration.
pub fn routes() -> Router<Arc<App>> {
    struct Routes(Router<Arc<App>>);
    impl api::Visitor for Routes {
        fn visit<O: Operation>(&mut self) {
            for route in O::INFO.routes {
                let method = match route.method {
                    Method::Get => MethodFilter::GET,
                    Method::Post => MethodFilter::POST,
                    Method::Put => MethodFilter::PUT,
                    Method::Patch => MethodFilter::PATCH,
                    Method::Delete => MethodFilter::DELETE,
                };
                self.0 = std::mem::take(&mut self.0).route(route.path, on(method, answer::<O>));
            }
        }
    }
    let mut routes = Routes(Router::new());
    api::visit(&mut routes);
    routes.0
}

async fn answer<O: Operation>(
    State(app): State<Arc<App>>,
    path: Result<Path<HashMap<String, String>>, PathRejection>,
    request: Request,
) -> Response {
    let encoding = wanted(request.headers());
    let reply = ReplyHeaders::of(&O::INFO);
    // A route for GET takes HEAD as well, and ids must not be spent on answers that nobody sees.
    if request.method() == axum::http::Method::HEAD {
        let error = Error::new(Code::MethodNotAllowed, "HEAD is not supported here");
        return dialect::failure(O::INFO.surface, encoding, &error);
    }
    let path = path.map(|Path(path)| path).map_err(|_| Error::invalid("path: is not UTF-8"));
    let answered = call::<O>(&app, path, request, encoding, reply.clone()).await;
    let mut response = answered.unwrap_or_else(|error| {
        error.log(&O::INFO.name());
        dialect::failure(O::INFO.surface, encoding, &error)
    });
    for (name, value) in reply.take() {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// The reply mirrors the request, unless the caller names another encoding.
fn wanted(headers: &HeaderMap) -> Encoding {
    match text(headers, "accept") {
        Some(accept) if accept.contains("json") || accept.contains("msgpack") => Encoding::of(Some(accept)),
        _ => Encoding::of(text(headers, "content-type")),
    }
}

async fn call<O: Operation>(
    app: &App,
    path: Result<HashMap<String, String>>,
    request: Request,
    encoding: Encoding,
    reply: ReplyHeaders,
) -> Result<Response> {
    let ready = app.ready()?;
    let (target, request, context, privileged) = {
        let understood = understand(app, ready, &O::INFO, O::Request::WHOLE, path, request).await?;
        let Understood { names, params, mut context, privileged } = understood;
        context.reply = reply;
        let target = O::Target::from_names(names).ok_or_else(|| Error::internal("a target of another shape"))?;
        (target, params.request()?, context, privileged)
    };
    let answer = match privileged {
        false => ready.gateway.call::<O>(Call { target, request, context }).await?,
        true => Box::pin(ready.gateway.call::<O::Privileged>(Call { target, request, context })).await?,
    };
    dialect::success(&O::INFO, O::status(&answer), encoding, &answer)
}

/// What a request says, whatever its operation.
struct Understood {
    names: Vec<Name>,
    params: Params,
    context: Context,
    /// Whether the caller has the privilege that the operation knows.
    privileged: bool,
}

/// Admits the caller and reads what he asks for. Apart from the call, so that nothing of the request is carried through it,
/// and the same code for every operation.
async fn understand(
    app: &App,
    ready: &Ready,
    info: &Info,
    takes_whole_body: bool,
    path: Result<HashMap<String, String>>,
    request: Request,
) -> Result<Understood> {
    let (parts, body) = request.into_parts();
    // Before the body is read: strangers get no work out of us.
    let caller = match app.is_open(info.surface) {
        true => None,
        false => {
            let caller = ready.gate.identify(credential(&parts.headers))?;
            caller.may(info)?;
            ready.limits.admit(info, &caller)?;
            Some(caller)
        }
    };
    if info.limited_by_client {
        let Client(address) = parts.extensions.get().expect("the edge knows the client");
        // Boxed because it is rare, and every request would have to hold it.
        Box::pin(ready.limits.admit_client(*address)).await?;
    }
    let (path, mut params) = (path?, Params::default());
    let in_path = |name: &str| path.contains_key(name);
    let (names_tenant, names_source) = (in_path(TENANT), in_path(SOURCE));
    path.into_iter().try_for_each(|(name, value)| params.add_text(name, value))?;
    params.add_query(parts.uri.query().unwrap_or_default())?;
    if !body.is_end_stream() {
        let body = read(body, app.config.http.body_limit).await?;
        let content_type = text(&parts.headers, "content-type");
        match takes_whole_body {
            true => params.set_body(content_type, body),
            false => params.add_body(content_type, body).await?,
        }
    }
    let named = |name: &&str| match (*name, &caller) {
        // Nobody names his tenant or source: they are the caller's. Administrators name what they administer.
        (TENANT, Some(caller)) if !names_tenant => Ok(caller.tenant()),
        (SOURCE, Some(caller)) if !names_source => caller.source(),
        (TENANT, Some(caller)) => caller.named_tenant(params.take_text(name)?.parse()?),
        _ => params.take_text(name)?.parse(),
    };
    let names = info.target.iter().map(named).collect::<Result<Vec<Name>>>()?;
    if let Some(caller) = &caller {
        caller.may_reach(&names)?;
    }
    // Only usage has an audit, and ids come by the ten thousands.
    let audited = caller.as_ref().filter(|_| info.surface == Surface::Usage);
    let actor = audited.map(|caller| caller.to_string().into());
    let user = caller.as_ref().and_then(|caller| caller.user().map(Arc::from));
    let privileged = caller.is_some_and(|caller| info.privilege.is_some_and(|scope| caller.has(scope, info.surface)));
    let context = Context {
        idempotency_key: parts
            .headers
            .get(IdempotencyKey::HEADER)
            .map(|value| IdempotencyKey::from_header(value.as_bytes()))
            .transpose()?,
        trace: parts.extensions.get::<Trace>().copied().unwrap_or_default(),
        named: Context::name(text(&parts.headers, Context::NAME_HEADER)),
        respond_async: Context::prefers_async(text(&parts.headers, Context::PREFER_HEADER)),
        actor,
        user,
        reply: ReplyHeaders::default(),
    };
    Ok(Understood { names, params, context, privileged })
}

async fn read(body: Body, limit: usize) -> Result<bytes::Bytes> {
    let too_large = |more: &str| Error::new(Code::PayloadTooLarge, format!("body: is larger than {limit} bytes{more}"));
    // Who says so himself need not send it.
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large(""));
    }
    to_bytes(body, limit).await.map_err(|error| too_large(", or broke off").source(error))
}

/// `X-API-Key`, or `Authorization: Bearer`.
pub fn credential(headers: &HeaderMap) -> Option<&str> {
    text(headers, "x-api-key").or_else(|| {
        let (scheme, token) = text(headers, "authorization")?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    })
}
