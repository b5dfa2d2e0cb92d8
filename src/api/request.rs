//! How a request is read and written.

use std::fmt;

use bytes::Bytes;
use serde::{Deserializer, Serialize, de::DeserializeOwned};
use utoipa::ToSchema;

use super::{Encoding, named};
use crate::error::{Error, Result};

/// What an operation is asked with. Almost every one is an object of fields.
pub trait Request: ToSchema + Send + Sync + Sized {
    /// Whether the body is taken as it is instead of field by field.
    const WHOLE: bool;

    fn read(encoding: Encoding, body: Bytes) -> Result<Self>;

    /// As our own client sends it.
    fn write(&self) -> Result<(Encoding, Bytes)>;

    /// From fields that stand in different places. They are looked at again to find the one at fault.
    fn from_fields<'de, D>(fields: impl Fn() -> D) -> Result<Self>
    where
        D: Deserializer<'de, Error: fmt::Display>;
}

impl<T: Serialize + DeserializeOwned + ToSchema + Send + Sync> Request for T {
    const WHOLE: bool = false;

    fn read(encoding: Encoding, body: Bytes) -> Result<Self> {
        encoding.decode_request(&body)
    }

    fn write(&self) -> Result<(Encoding, Bytes)> {
        Ok((Encoding::MessagePack, Encoding::MessagePack.encode(self)?))
    }

    fn from_fields<'de, D>(fields: impl Fn() -> D) -> Result<Self>
    where
        D: Deserializer<'de, Error: fmt::Display>,
    {
        T::deserialize(fields()).or_else(|_| named(fields()))
    }
}

/// A body that its operation reads by itself: what is wrong with a part of it need not be wrong with all of it. `T` says
/// how it should look.
#[derive(Debug, Clone)]
pub struct WholeBody<T> {
    pub encoding: Encoding,
    pub bytes: Bytes,
    looks: std::marker::PhantomData<T>,
}

impl<T> WholeBody<T> {
    pub fn new(encoding: Encoding, bytes: impl Into<Bytes>) -> Self {
        Self { encoding, bytes: bytes.into(), looks: std::marker::PhantomData }
    }
}

impl<T: ToSchema + Send + Sync> Request for WholeBody<T> {
    const WHOLE: bool = true;

    fn read(encoding: Encoding, body: Bytes) -> Result<Self> {
        Ok(Self::new(encoding, body))
    }

    fn write(&self) -> Result<(Encoding, Bytes)> {
        Ok((self.encoding, self.bytes.clone()))
    }

    fn from_fields<'de, D>(_: impl Fn() -> D) -> Result<Self>
    where
        D: Deserializer<'de, Error: fmt::Display>,
    {
        Err(Error::invalid("body: is missing"))
    }
}

impl<T: ToSchema> utoipa::PartialSchema for WholeBody<T> {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        T::schema()
    }
}

impl<T: ToSchema> ToSchema for WholeBody<T> {
    fn name() -> std::borrow::Cow<'static, str> {
        T::name()
    }

    fn schemas(schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
        T::schemas(schemas);
    }
}
