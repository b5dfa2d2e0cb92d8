//! The way from a transport to the code that answers: in this process where it hosts the operation, else over NATS.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    marker::PhantomData,
    sync::Arc,
};

use bytes::Bytes;
use futures::future::BoxFuture;

use crate::{
    api::{Call, Context, Encoding, Handle, Info, Name, Operation, Request, Target},
    client::Client,
    error::{Error, Result},
};

/// The operations that this process answers itself.
#[derive(Default)]
pub struct Hosted {
    typed: HashMap<TypeId, Box<dyn Any + Send + Sync>>,
    wired: Vec<Arc<dyn Wired>>,
}

impl Hosted {
    pub fn add<O: Operation>(&mut self, handler: &Arc<impl Handle<O>>) {
        let dispatch: Arc<dyn Dispatch<O>> = handler.clone();
        self.typed.insert(TypeId::of::<O>(), Box::new(dispatch));
        self.wired.push(Arc::new(WiredOperation { handler: handler.clone(), operation: PhantomData }));
    }

    fn get<O: Operation>(&self) -> Option<&Arc<dyn Dispatch<O>>> {
        self.typed.get(&TypeId::of::<O>())?.downcast_ref()
    }

    /// The same operations, for transports that carry bytes.
    pub fn wired(&self) -> &[Arc<dyn Wired>] {
        &self.wired
    }
}

/// [`Handle`] for a handler whose type is not known.
trait Dispatch<O: Operation>: Send + Sync {
    fn dispatch(&self, call: Call<O>) -> BoxFuture<'_, Result<O::Response>>;
}

impl<O: Operation, H: Handle<O>> Dispatch<O> for H {
    fn dispatch(&self, call: Call<O>) -> BoxFuture<'_, Result<O::Response>> {
        Box::pin(self.handle(call))
    }
}

/// An operation that takes and answers bytes.
pub trait Wired: Send + Sync {
    fn info(&self) -> &'static Info;

    /// `names` are the target's, as the subject has them.
    fn answer(
        &self,
        encoding: Encoding,
        names: Vec<Name>,
        body: Bytes,
        context: Context,
    ) -> BoxFuture<'static, Result<Encoded>>;
}

/// An answer as bytes.
pub struct Encoded {
    pub body: Bytes,
    /// Whether it was given before.
    pub repeated: bool,
}

struct WiredOperation<O, H> {
    handler: Arc<H>,
    operation: PhantomData<O>,
}

impl<O: Operation, H: Handle<O>> Wired for WiredOperation<O, H> {
    fn info(&self) -> &'static Info {
        &O::INFO
    }

    fn answer(
        &self,
        encoding: Encoding,
        names: Vec<Name>,
        body: Bytes,
        context: Context,
    ) -> BoxFuture<'static, Result<Encoded>> {
        let handler = self.handler.clone();
        // Read before the future is made, so that it does not carry what was read.
        let target = O::Target::from_names(names).ok_or_else(|| Error::internal("a subject of another shape"));
        let call = target.and_then(|target| {
            let request = O::Request::read(encoding, body)?;
            Ok(Call { target, request, context })
        });
        match call {
            Ok(call) => Box::pin(async move {
                let answer = handler.handle(call).await?;
                Ok(Encoded { body: encoding.encode(&answer)?, repeated: O::is_repeated(&answer) })
            }),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }
}

/// Calls operations, wherever they are hosted.
pub struct Gateway {
    hosted: Hosted,
    client: Client,
}

impl Gateway {
    pub fn new(hosted: Hosted, client: Client) -> Self {
        Self { hosted, client }
    }

    pub async fn call<O: Operation>(&self, call: Call<O>) -> Result<O::Response> {
        match self.hosted.get::<O>() {
            Some(handler) => handler.dispatch(call).await,
            // Boxed, so that calls in this process don't carry the larger state of one over the network.
            None => Box::pin(self.client.call_with::<O>(&call.target, &call.request, &call.context)).await,
        }
    }
}
