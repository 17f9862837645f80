// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/seal"
)

// saltMin is how many bytes a salt has at least, so that no tenant guesses it.
const saltMin = 16

// readSecrets reads the files of secrets that the config names. A config that is only checked has
// them not read.
func (c *cacheConfig) readSecrets() (err error) {
	if c.seal != "" {
		if c.cache.Seal, err = seal.ReadKeys(c.seal); err != nil {
			return c.wrong("", 0, "seal", "%w", err)
		}
	}
	for n := range c.namespaces {
		s := &c.namespaces[n]
		if s.salt == "" {
			continue
		}
		s.access.Salt, err = seal.ReadSecret(s.salt)
		if err == nil && len(s.access.Salt) < saltMin {
			err = fmt.Errorf("%s has %d bytes: want %d at least, as of \"openssl rand -hex 32\"",
				s.salt, len(s.access.Salt), saltMin)
		}
		if err != nil {
			return c.wrong("namespace", n, "salt", "%w", err)
		}
	}
	if k := &c.cluster; k.etcdCertificate != "" {
		k.identity, err = identity.FromFiles(k.etcdCertificate, k.etcdKey, k.etcdAuthority)
		if err != nil {
			return c.wrong("cluster", 0, "etcd_certificate", "%w", err)
		}
	}
	return nil
}

// access says who may use a namespace, by the first of these that lists anybody: the table of the
// config that names it, the directory, the table for all others. One without a name is nobody's
// where any of them lists somebody.
func (m *membership) access(now *cacheConfig, name string) (a serve.Access) {
	m.mu.Lock()
	view := m.view
	m.mu.Unlock()
	if view == nil {
		view = &directory.View{}
	}
	lists := func(a serve.Access) bool { return a.Readers != nil || a.Writers != nil }
	of := func(n directory.Namespace) serve.Access {
		return serve.Access{Readers: n.Readers, Writers: n.Writers}
	}
	if name == "" {
		some := slices.ContainsFunc(now.namespaces,
			func(s cacheNamespace) bool { return lists(s.access) })
		for _, n := range view.Namespaces {
			some = some || lists(of(n))
		}
		if some {
			a = serve.Access{Readers: []string{}, Writers: []string{}}
		}
		return a
	}
	own, others := now.table(name).access, now.table("*").access
	for _, from := range []serve.Access{own, of(view.Namespaces[name]), others} {
		if lists(from) {
			a = from
			break
		}
	}
	if a.Salt = own.Salt; a.Salt == nil {
		a.Salt = others.Salt
	}
	return a
}

// table is the [[namespace]] of a name; an empty one: there is none.
func (c *cacheConfig) table(name string) cacheNamespace {
	for _, s := range c.namespaces {
		if s.name == name {
			return s
		}
	}
	return cacheNamespace{}
}

// checkSecure refuses keys of the config about who may do what that do not go together.
func (c *cacheConfig) checkSecure(refuse func(bad bool, table string, nth int, key, format string,
	args ...any)) {
	for n, s := range c.namespaces {
		for key, list := range map[string][]string{"readers": s.access.Readers,
			"writers": s.access.Writers} {
			bad := directory.CheckUsers(key, list)
			refuse(bad != nil, "namespace", n, key, "%w", bad)
		}
	}
	k := &c.cluster
	files := []string{k.etcdCertificate, k.etcdKey, k.etcdAuthority}
	none := slices.Equal(files, make([]string, len(files)))
	refuse(!none && slices.Contains(files, ""), "cluster", 0, "etcd_certificate",
		"etcd_certificate, etcd_key and etcd_authority go together")
	plain := func(url string) bool { return len(url) < 6 || url[:6] != "https:" }
	refuse(!none && slices.ContainsFunc(k.etcd, plain), "cluster", 0, "etcd",
		"with a certificate all of them are of https")
}
