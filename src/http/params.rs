//! Parameters of a request, wherever they stand: path, query or body.
//!
//! What stands in the URL is text and becomes a number or a boolean when the field wants one; what stands in a body has
//! its type already.

use serde::{
    Deserializer,
    de::{
        self, DeserializeOwned, IntoDeserializer, Visitor,
        value::{MapDeserializer, StrDeserializer},
    },
};
use serde_json::Value;

use crate::{
    api::Encoding,
    error::{Error, Result},
};

#[derive(Debug, Default)]
pub struct Params(Vec<(String, Param)>);

#[derive(Debug)]
enum Param {
    Text(String),
    Value(Value),
}

impl Params {
    pub fn add_text(&mut self, name: impl Into<String>, text: impl Into<String>) -> Result<()> {
        self.add(name.into(), Param::Text(text.into()))
    }

    pub fn add_query(&mut self, query: &str) -> Result<()> {
        form_urlencoded::parse(query.as_bytes()).try_for_each(|(name, text)| self.add_text(name, text))
    }

    /// Adds the members of a body, which must be an object, or empty.
    pub fn add_body(&mut self, encoding: Encoding, body: &[u8]) -> Result<()> {
        match encoding.decode(body)? {
            Value::Object(members) => {
                members.into_iter().try_for_each(|(name, value)| self.add(name, Param::Value(value)))
            }
            _ => Err(Error::invalid("body: must be an object")),
        }
    }

    fn add(&mut self, name: String, param: Param) -> Result<()> {
        if self.0.iter().any(|(known, _)| *known == name) {
            return Err(Error::field(&name, "is given twice"));
        }
        self.0.push((name, param));
        Ok(())
    }

    /// Takes one parameter out as text.
    pub fn take_text(&mut self, name: &str) -> Result<String> {
        let Some(index) = self.0.iter().position(|(known, _)| known == name) else {
            return Err(Error::field(name, "is missing"));
        };
        match self.0.swap_remove(index).1 {
            Param::Text(text) | Param::Value(Value::String(text)) => Ok(text),
            Param::Value(_) => Err(Error::field(name, "must be a string")),
        }
    }

    /// The rest as a request.
    pub fn request<T: DeserializeOwned>(&self) -> Result<T> {
        let fields = || MapDeserializer::new(self.0.iter().map(|(name, param)| (name.as_str(), param)));
        T::deserialize(fields()).or_else(|_| crate::api::named(fields()))
    }
}

type DeError = serde_json::Error;

impl<'de> IntoDeserializer<'de, DeError> for &'de Param {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Parses text as the type that the field wants; a value speaks for itself.
macro_rules! parsed {
    ($($method:ident $visit:ident $type:ty, $expected:literal;)+) => {
        $(fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DeError> {
            match self {
                Param::Text(text) => match text.parse::<$type>() {
                    Ok(value) => visitor.$visit(value),
                    Err(_) => Err(de::Error::invalid_value(de::Unexpected::Str(text), &$expected)),
                },
                Param::Value(value) => value.$method(visitor),
            }
        })+
    };
}

macro_rules! as_value {
    ($($method:ident($($name:ident: $type:ty),*);)+) => {
        $(fn $method<V: Visitor<'de>>(self, $($name: $type,)* visitor: V) -> Result<V::Value, DeError> {
            match self {
                Param::Text(text) => {
                    let text: StrDeserializer<'_, DeError> = text.as_str().into_deserializer();
                    text.$method($($name,)* visitor)
                }
                Param::Value(value) => value.$method($($name,)* visitor),
            }
        })+
    };
}

impl<'de> Deserializer<'de> for &'de Param {
    type Error = DeError;

    parsed! {
        deserialize_bool visit_bool bool, "true or false";
        deserialize_i8 visit_i8 i8, "a whole number";
        deserialize_i16 visit_i16 i16, "a whole number";
        deserialize_i32 visit_i32 i32, "a whole number";
        deserialize_i64 visit_i64 i64, "a whole number";
        deserialize_u8 visit_u8 u8, "a whole number";
        deserialize_u16 visit_u16 u16, "a whole number";
        deserialize_u32 visit_u32 u32, "a whole number";
        deserialize_u64 visit_u64 u64, "a whole number";
        deserialize_f32 visit_f32 f32, "a number";
        deserialize_f64 visit_f64 f64, "a number";
    }

    as_value! {
        deserialize_any();
        deserialize_char();
        deserialize_str();
        deserialize_string();
        deserialize_bytes();
        deserialize_byte_buf();
        deserialize_unit();
        deserialize_unit_struct(name: &'static str);
        deserialize_seq();
        deserialize_tuple(len: usize);
        deserialize_tuple_struct(name: &'static str, len: usize);
        deserialize_map();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
        deserialize_identifier();
        deserialize_ignored_any();
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DeError> {
        match self {
            Param::Value(Value::Null) => visitor.visit_none(),
            param => visitor.visit_some(param),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, DeError> {
        visitor.visit_newtype_struct(self)
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        size: Option<u32>,
        rand: Option<bool>,
        name: Option<String>,
    }

    fn parse(query: &str, body: &str) -> Result<Sample> {
        let mut params = Params::default();
        params.add_query(query)?;
        params.add_body(Encoding::Json, body.as_bytes())?;
        params.request()
    }

    #[test]
    fn text_becomes_what_the_field_wants_and_stays_text_where_it_is_wanted() {
        let expected = Sample { size: Some(7), rand: Some(true), name: Some("12".into()) };
        assert_eq!(parse("size=7&rand=true&name=12", "").unwrap(), expected);
        assert_eq!(parse("size=7", r#"{"rand":true,"name":"12"}"#).unwrap(), expected);
        assert_eq!(parse("", r#"{"size":null}"#).unwrap(), Sample { size: None, rand: None, name: None });
    }

    #[test]
    fn errors_name_the_parameter() {
        for (query, body, expected) in [
            ("size=x", "", "size"),
            ("size=-1", "", "size"),
            ("sise=1", "", "sise"),
            ("size=1&size=2", "", "size: is given twice"),
            ("size=1", r#"{"size":2}"#, "size: is given twice"),
            ("", r#"{"size":"2"}"#, "size"),
            ("", "[1]", "body: must be an object"),
            ("", "{", "EOF"),
        ] {
            let error = parse(query, body).unwrap_err();
            assert!(error.message.contains(expected), "{query} {body}: {error}");
        }
    }
}
