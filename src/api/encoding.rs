//! How requests and replies are written: JSON, or MessagePack where the caller says so.

use std::{fmt::Display, io::Read};

use bytes::Bytes;
use rmp_serde::{
    config::{DefaultConfig, HumanReadableConfig},
    decode::ReadReader,
};
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, value::MapDeserializer},
};
use serde_json::Value;

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encoding {
    #[default]
    Json,
    MessagePack,
}

impl Encoding {
    /// From a `Content-Type`; none, and anything that is not MessagePack, is JSON.
    pub fn of(content_type: Option<&str>) -> Self {
        let essence = content_type.and_then(|text| text.split(';').next()).unwrap_or_default().trim();
        match essence.to_ascii_lowercase().as_str() {
            "application/msgpack" | "application/x-msgpack" | "application/vnd.msgpack" => Encoding::MessagePack,
            _ => Encoding::Json,
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Encoding::Json => "application/json",
            Encoding::MessagePack => "application/msgpack",
        }
    }

    pub fn encode(self, value: &impl Serialize) -> Result<Bytes> {
        match self {
            Encoding::Json => serde_json::to_vec(value).map_err(Error::internal),
            Encoding::MessagePack => {
                let mut packed = Vec::with_capacity(128);
                let mut packing = rmp_serde::Serializer::new(&mut packed).with_struct_map().with_human_readable();
                value.serialize(&mut packing).map(|()| packed).map_err(Error::internal)
            }
        }
        .map(Bytes::from)
    }

    /// A reply of our own server: whole and sound, or somebody else's.
    pub fn decode_reply<T: DeserializeOwned>(self, body: &[u8]) -> Result<T> {
        match self {
            Encoding::Json => serde_json::from_slice(body).map_err(Error::internal),
            Encoding::MessagePack => {
                let mut unpacking = rmp_serde::Deserializer::from_read_ref(body).with_human_readable();
                T::deserialize(&mut unpacking).map_err(Error::internal)
            }
        }
    }

    /// A request is an object: serde would also take a list for one, by position, and `[3]` says nothing to a reader.
    pub fn decode_request<T: DeserializeOwned>(self, body: &[u8]) -> Result<T> {
        let begins_object = match self {
            Encoding::Json => |first: &u8| *first == b'{',
            Encoding::MessagePack => |first: &u8| matches!(first, 0x80..=0x8f | 0xde | 0xdf),
        };
        match body.trim_ascii_start().first() {
            Some(first) if !begins_object(first) => Err(Error::invalid("body: must be an object")),
            _ => self.decode(body),
        }
    }

    /// An empty body is a value with every default. The error names the field.
    pub fn decode<T: DeserializeOwned>(self, body: &[u8]) -> Result<T> {
        match self {
            _ if body.is_empty() => {
                let nothing = MapDeserializer::<_, serde_json::Error>::new(std::iter::empty::<(&str, &str)>());
                T::deserialize(nothing).map_err(|error| Error::invalid(error.to_string()))
            }
            Encoding::Json => serde_json::from_slice(body).map_err(|error| self.at_fault::<T>(body, &error)),
            Encoding::MessagePack => {
                let mut rest = body;
                let value =
                    T::deserialize(&mut unpacking(&mut rest)).map_err(|error| self.at_fault::<T>(body, &error))?;
                if rest.is_empty() { Ok(value) } else { Err(Error::invalid("body: more bytes than one value")) }
            }
        }
    }

    /// Looks again at what was not understood, for the field at fault. By way of a value without a type, so that there is one
    /// second look for all encodings.
    fn at_fault<T: DeserializeOwned>(self, body: &[u8], error: &dyn Display) -> Error {
        let value: Option<Value> = match self {
            Encoding::Json => serde_json::from_slice(body).ok(),
            Encoding::MessagePack => Value::deserialize(&mut unpacking(body)).ok(),
        };
        let named = value.and_then(|value| named::<T, _>(value).err());
        named.unwrap_or_else(|| Error::invalid(format!("body: {error}")))
    }
}

/// Reads MessagePack as deep as JSON's own parser goes: each level takes some of the stack. What is text in JSON is text here.
pub fn unpacking<R: Read>(body: R) -> rmp_serde::Deserializer<ReadReader<R>, HumanReadableConfig<DefaultConfig>> {
    const MOST_DEPTH: usize = 128;
    let mut unpacking = rmp_serde::Deserializer::new(body).with_human_readable();
    unpacking.set_max_depth(MOST_DEPTH);
    unpacking
}

/// Deserializes, and says in the error which field was at fault. Keeping track costs, so this is for the second look at
/// what has failed.
pub fn named<'de, T: DeserializeOwned, D>(deserializer: D) -> Result<T>
where
    D: serde::Deserializer<'de>,
    D::Error: std::fmt::Display,
{
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let path = error.path().to_string();
        let problem = error.into_inner().to_string();
        match path.as_str() {
            "." => Error::invalid(format!("body: {problem}")),
            field => Error::field(field, problem),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Json;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        size: Option<u32>,
        ids: Option<Vec<i64>>,
    }

    #[test]
    fn both_encodings_carry_the_same_values() {
        let sample = Sample { size: Some(3), ids: Some(vec![1, i64::MAX]) };
        for encoding in [Encoding::Json, Encoding::MessagePack] {
            assert_eq!(encoding.decode::<Sample>(&encoding.encode(&sample).unwrap()).unwrap(), sample);
            assert_eq!(encoding.decode::<Sample>(b"").unwrap(), Sample { size: None, ids: None });
        }
    }

    #[test]
    fn an_id_is_text_in_every_encoding() {
        let id = uuid::Uuid::from_u128(7);
        let text = rmp_serde::to_vec(&id.to_string()).unwrap();
        assert_eq!(Encoding::MessagePack.encode(&id).unwrap(), text);
        assert_eq!(Encoding::MessagePack.decode::<uuid::Uuid>(&text).unwrap(), id);
        assert_eq!(Encoding::MessagePack.decode_reply::<uuid::Uuid>(&text).unwrap(), id);
    }

    #[test]
    fn errors_name_the_field() {
        for (body, expected) in [
            (r#"{"size": "x"}"#, "size"),
            (r#"{"sise": 1}"#, "sise"),
            (r#"{"ids": [1, "x"]}"#, "ids[1]"),
            (r#"{"size": 1, "size": 2}"#, "size"),
            (r#"{"size": 1} trailing"#, "trailing"),
            ("[", "EOF"),
        ] {
            let error = Encoding::Json.decode::<Sample>(body.as_bytes()).unwrap_err();
            assert!(error.message.contains(expected), "{body}: {error}");
        }
        let body = rmp_serde::to_vec_named(&serde_json::json!({ "ids": [1, "x"] })).unwrap();
        let error = Encoding::MessagePack.decode::<Sample>(&body).unwrap_err();
        assert!(error.message.starts_with("ids[1]: "), "{error}");
        for list in [&b" [3]"[..], b"3", b"nothing"] {
            assert_eq!(Encoding::Json.decode_request::<Sample>(list).unwrap_err().message, "body: must be an object");
        }
        let list = rmp_serde::to_vec(&Sample { size: Some(3), ids: None }).unwrap();
        assert!(Encoding::MessagePack.decode_request::<Sample>(&list).is_err());
        assert_eq!(Encoding::Json.decode_request::<Sample>(b"").unwrap(), Sample { size: None, ids: None });
        assert!(Encoding::MessagePack.decode::<Sample>(b"\xc1").is_err());
        assert!(Encoding::MessagePack.decode::<Sample>(b"\x80\x80").is_err());
    }

    #[test]
    fn what_is_too_deep_is_refused() {
        for (encoding, open) in [(Encoding::Json, b'['), (Encoding::MessagePack, 0x91)] {
            let deep = vec![open; 100_000];
            assert!(encoding.decode::<Json>(&deep).is_err() && encoding.decode::<Value>(&deep).is_err());
        }
    }

    #[test]
    fn the_content_type_decides() {
        assert_eq!(Encoding::of(Some("Application/MsgPack; charset=x")), Encoding::MessagePack);
        assert_eq!(Encoding::of(Some("text/plain")), Encoding::Json);
        assert_eq!(Encoding::of(None), Encoding::Json);
    }
}
