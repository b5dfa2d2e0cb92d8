//! Who may call an operation, and which of the united interfaces it belongs to.

/// Who may call. Over HTTP the caller's credentials decide; over NATS the permission on the subject has decided already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The operator: admin token, or the default tenant's key with the role `admin`.
    Operator,
    /// Services that take ids: the role `mint`.
    Mint,
    /// A tenant's services that set timers: the role `timers`.
    Timers,
    /// Those of them that may see secrets: the role `secrets`.
    Secrets,
    /// Any of a tenant's services.
    Key,
    /// A tenant's services that write and read its usage: the role `usage`.
    Usage,
    /// Those of them that may rewrite what is older than the backfill window: the role `elevated`.
    Elevated,
    /// Whoever administers the tenant that is named: the operator, or its own key with the role `admin`.
    Tenant,
}

/// One of the interfaces that Tidemark unites. Each has paths, a dialect and a rule for strangers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// IDBuilder's: `{code, message, data}` with codes 1001 to 4003.
    Ids,
    /// The noid server's: JSON for answers, plain text for errors.
    Pools,
    /// The stage service's: bare answers, `{"error"}`.
    Stages,
    /// The timer platform's: `{code, message, data}` with codes 0 to 4.
    Timers,
    /// The usage collector's: bare answers, errors with string codes.
    Usage,
    /// Our own: bare answers, errors as over NATS.
    Native,
}

impl Surface {
    /// The surface that a path belongs to, whether or not there is such a route.
    pub fn of_path(path: &str) -> Self {
        let first_is =
            |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        match path {
            _ if first_is("/v1/id") || first_is("/v1/config") || first_is("/v1/auth") => Surface::Ids,
            _ if first_is("/pools") || first_is("/stats") => Surface::Pools,
            _ if first_is("/stages") => Surface::Stages,
            _ if first_is("/timers") || first_is("/healthz") => Surface::Timers,
            _ if first_is("/api/uc/v1") => Surface::Usage,
            _ => Surface::Native,
        }
    }

    /// Surfaces that ask nobody for credentials unless the configuration closes them, as the services they replace.
    pub fn open_by_default(self) -> bool {
        matches!(self, Surface::Pools | Surface::Stages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_surface() {
        for (path, surface) in [
            ("/v1/id/increment", Surface::Ids),
            ("/v1/identity", Surface::Native),
            ("/v1/admin/keys", Surface::Native),
            ("/pools", Surface::Pools),
            ("/poolside", Surface::Native),
            ("/stages/7/acts", Surface::Stages),
            ("/timers/x", Surface::Timers),
            ("/api/uc/v1/usage/records", Surface::Usage),
        ] {
            assert_eq!(Surface::of_path(path), surface, "{path}");
        }
    }
}
