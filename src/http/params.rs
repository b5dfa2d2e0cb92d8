//! Parameters of a request, wherever they stand: path, query or body.
//!
//! What stands in the URL or in a form is text and becomes a number or a boolean when the field wants one; what stands in a body has
//! its type already.

use std::{convert::Infallible, future::ready};

use bytes::Bytes;
use futures::stream;
use percent_encoding::percent_decode;
use serde::{
    Deserializer,
    de::{
        self, IntoDeserializer, Visitor,
        value::{MapDeserializer, StrDeserializer},
    },
};
use serde_json::Value;

use crate::{
    api::{Encoding, Members, Request},
    error::{Error, Result},
};

/// No operation has nearly as many. Each is compared with those before it, so there must be an end.
const MOST: usize = 64;

#[derive(Debug, Default)]
pub struct Params {
    named: Vec<(String, Param)>,
    /// A body that is taken as a whole.
    whole: Option<(Encoding, Bytes)>,
}

#[derive(Debug)]
enum Param {
    Text(String),
    /// The members of an object, each given as text: `metadata.color=red`.
    Members(Vec<(String, String)>),
    Value(Value),
}

impl Params {
    pub fn add_text(&mut self, name: impl Into<String>, text: impl Into<String>) -> Result<()> {
        let (name, text) = (name.into(), text.into());
        let Some((object, member)) = name.split_once('.') else { return self.add(name, Param::Text(text)) };
        match self.named.iter_mut().find(|(known, _)| known == object) {
            Some((_, Param::Members(members))) if members.len() == MOST => Err(too_many()),
            Some((_, Param::Members(members))) if members.iter().any(|(known, _)| known == member) => {
                Err(Error::field(&name, "is given twice"))
            }
            Some((_, Param::Members(members))) => {
                members.push((member.to_owned(), text));
                Ok(())
            }
            _ => self.add(object.to_owned(), Param::Members(vec![(member.to_owned(), text)])),
        }
    }

    pub fn add_query(&mut self, query: &str) -> Result<()> {
        self.add_urlencoded(query.as_bytes())
    }

    /// Adds the members of a body: a form, an object, or nothing.
    pub async fn add_body(&mut self, content_type: Option<&str>, body: Bytes) -> Result<()> {
        match Kind::of(content_type, &body) {
            Kind::UrlEncoded => self.add_urlencoded(&body),
            // Boxed because it is rare and large.
            Kind::Multipart { boundary } => Box::pin(self.add_multipart(boundary, body)).await,
            Kind::Encoded(encoding) => {
                let Members(members) = encoding.decode_request(&body)?;
                members.into_iter().try_for_each(|(name, value)| self.add(name, Param::Value(value)))
            }
        }
    }

    /// Takes a body as it is.
    pub fn set_body(&mut self, content_type: Option<&str>, body: Bytes) {
        self.whole = Some((Encoding::of(content_type), body));
    }

    fn add_urlencoded(&mut self, form: &[u8]) -> Result<()> {
        if percent_decode(form).decode_utf8().is_err() {
            return Err(Error::invalid("a parameter is not UTF-8"));
        }
        form_urlencoded::parse(form).try_for_each(|(name, text)| self.add_text(name, text))
    }

    async fn add_multipart(&mut self, boundary: String, body: Bytes) -> Result<()> {
        let broken = |error: multer::Error| Error::invalid(format!("body: {error}"));
        let mut form = multer::Multipart::new(stream::once(ready(Ok::<_, Infallible>(body))), boundary);
        while let Some(field) = form.next_field().await.map_err(broken)? {
            let Some(name) = field.name().map(str::to_owned) else {
                return Err(Error::invalid("body: a part of the form has no name"));
            };
            let text = String::from_utf8(field.bytes().await.map_err(broken)?.into());
            self.add_text(&name, text.map_err(|_| Error::field(&name, "is not UTF-8"))?)?;
        }
        Ok(())
    }

    fn add(&mut self, name: String, param: Param) -> Result<()> {
        if self.named.len() == MOST {
            return Err(too_many());
        }
        if self.named.iter().any(|(known, _)| *known == name) {
            return Err(Error::field(&name, "is given twice"));
        }
        self.named.push((name, param));
        Ok(())
    }

    /// Takes one parameter out as text.
    pub fn take_text(&mut self, name: &str) -> Result<String> {
        let Some(index) = self.named.iter().position(|(known, _)| known == name) else {
            return Err(Error::field(name, "is missing"));
        };
        match self.named.swap_remove(index).1 {
            Param::Text(text) | Param::Value(Value::String(text)) => Ok(text),
            Param::Members(_) | Param::Value(_) => Err(Error::field(name, "must be a string")),
        }
    }

    /// The rest as a request.
    pub fn request<T: Request>(self) -> Result<T> {
        if let Some((encoding, body)) = self.whole {
            return match self.named.first() {
                Some((name, _)) => Err(Error::field(name, "is not known here")),
                None => T::read(encoding, body),
            };
        }
        T::from_fields(|| MapDeserializer::new(self.named.iter().map(|(name, param)| (name.as_str(), param))))
    }
}

fn too_many() -> Error {
    Error::invalid(format!("more than {MOST} parameters"))
}

/// How a body is written.
enum Kind {
    UrlEncoded,
    Multipart { boundary: String },
    Encoded(Encoding),
}

impl Kind {
    fn of(content_type: Option<&str>, body: &[u8]) -> Self {
        let text = content_type.unwrap_or_default();
        let is = |essence: &str| text.split(';').next().is_some_and(|is| is.trim().eq_ignore_ascii_case(essence));
        // curl calls everything urlencoded that is sent with -d, and no form begins with a brace.
        let is_json = || matches!(body.trim_ascii_start().first(), Some(b'{' | b'['));
        if is("application/x-www-form-urlencoded") && !is_json() {
            return Kind::UrlEncoded;
        }
        let boundary = is("multipart/form-data").then(|| multer::parse_boundary(text));
        match boundary {
            Some(Ok(boundary)) => Kind::Multipart { boundary },
            _ => Kind::Encoded(Encoding::of(content_type)),
        }
    }
}

type DeError = serde_json::Error;

impl<'de> IntoDeserializer<'de, DeError> for &'de Param {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

fn texts(members: &[(String, String)]) -> impl de::MapAccess<'_, Error = DeError> {
    MapDeserializer::new(members.iter().map(|(name, text)| (name.as_str(), text.as_str())))
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
                Param::Members(members) => visitor.visit_map(texts(members)),
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
                Param::Members(members) => {
                    $(let _ = $name;)*
                    visitor.visit_map(texts(members))
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
    use futures::FutureExt;
    use serde::{Deserialize, Serialize};
    use utoipa::ToSchema;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize, ToSchema)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        size: Option<u32>,
        rand: Option<bool>,
        name: Option<String>,
    }

    fn parse(query: &str, body: &str) -> Result<Sample> {
        parse_as(None, query, body)
    }

    fn parse_as(content_type: Option<&str>, query: &str, body: &str) -> Result<Sample> {
        let mut params = Params::default();
        params.add_query(query)?;
        let body = params.add_body(content_type, Bytes::from(body.to_owned()));
        body.now_or_never().expect("nothing to wait for")?;
        params.request()
    }

    #[test]
    fn forms_are_parameters_too() {
        let expected = Sample { size: Some(7), rand: None, name: Some("a b".into()) };
        let urlencoded = Some("application/x-www-form-urlencoded; charset=utf-8");
        assert_eq!(parse_as(urlencoded, "", "size=7&name=a+b").unwrap(), expected);
        assert_eq!(parse_as(urlencoded, "", r#" {"size": 7, "name": "a b"}"#).unwrap(), expected, "curl -d");
        let multipart = Some("multipart/form-data; boundary=XX");
        let part = |name: &str, text: &str| format!("--XX\r\nContent-Disposition: form-data; {name}\r\n\r\n{text}\r\n");
        let body = part("name=size", "7") + &part("name=\"name\"", "a b") + "--XX--\r\n";
        assert_eq!(parse_as(multipart, "", &body).unwrap(), expected);
        for (content_type, query, body, problem) in [
            (urlencoded, "size=1", "size=2", "size: is given twice"),
            (urlencoded, "", "size=x", "size"),
            (multipart, "", "--XX\r\nContent", "body"),
            (multipart, "", &part("x=y", "7"), "body"),
            (Some("multipart/form-data"), "", "size=1", "body"),
        ] {
            let error = parse_as(content_type, query, body).unwrap_err();
            assert!(error.message.contains(problem), "{body}: {error}");
        }
    }

    #[test]
    fn text_becomes_what_the_field_wants_and_stays_text_where_it_is_wanted() {
        let expected = Sample { size: Some(7), rand: Some(true), name: Some("12".into()) };
        assert_eq!(parse("size=7&rand=true&name=12", "").unwrap(), expected);
        assert_eq!(parse("size=7", r#"{"rand":true,"name":"12"}"#).unwrap(), expected);
        assert_eq!(parse("", r#"{"size":null}"#).unwrap(), Sample { size: None, rand: None, name: None });
    }

    #[test]
    fn members_of_an_object_are_parameters_with_a_dot() {
        #[derive(Debug, PartialEq, Serialize, Deserialize, ToSchema)]
        struct Filter {
            metadata: std::collections::BTreeMap<String, String>,
        }
        let mut params = Params::default();
        params.add_query("metadata.a=1&metadata.b.c=d+e").unwrap();
        let expected = [("a", "1"), ("b.c", "d e")].map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        assert!(params.add_query("metadata.a=2").unwrap_err().message.contains("metadata.a: is given twice"));
        assert_eq!(params.request::<Filter>().unwrap(), Filter { metadata: expected });
        assert!(parse("size.x=1", "").unwrap_err().message.contains("size"));
        let flood: String = (0..1000).map(|index| format!("m.{index}&")).collect();
        assert!(Params::default().add_query(&flood).unwrap_err().message.contains("more than 64"));
    }

    #[test]
    fn a_flood_of_parameters_is_refused_before_it_costs_anything() {
        let flood: String = (0..200_000).map(|index| format!("{index}&")).collect();
        let urlencoded = Some("application/x-www-form-urlencoded");
        assert!(parse_as(urlencoded, "", &flood).unwrap_err().message.contains("more than 64"));
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
            ("name=%ff", "", "not UTF-8"),
            ("", "[1]", "body: must be an object"),
            ("", "{", "EOF"),
        ] {
            let error = parse(query, body).unwrap_err();
            assert!(error.message.contains(expected), "{query} {body}: {error}");
        }
    }
}
