// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/directory"
)

// TestUsers: an entry of a namespace that lists who may use it, and is no good, is one that nobody
// may use.
func TestUsers(t *testing.T) {
	d := &Directory{nodes: "sluice/nodes/", spaces: "sluice/namespaces/",
		changed: make(chan struct{}), come: make(chan struct{}), gone: map[string]time.Time{}}
	nobody := directory.Namespace{Readers: []string{}, Writers: []string{}}
	want := map[string]directory.Namespace{"good": {Priority: 2, Readers: []string{"a"}},
		"empty": {Writers: []string{}}, "bad text": nobody, "bad number": nobody,
		"bad name": nobody, "long": nobody, "other case": nobody}
	var all []keyValue
	for name, value := range map[string]string{"good": `{"priority":2,"readers":["a"]}`,
		"empty": `{"writers":[]}`, "bad text": `{"readers":"a"}`,
		"bad number": `{"priority":99,"writers":["a"]}`, "bad name": `{"readers":["a",""]}`,
		"long":       `{"readers":["a"]}` + string(make([]byte, valueMax)),
		"other case": `{"priority":99,"Readers":["a"]}`,
		"no lists":   `{"priority":99}`} {
		all = append(all, keyValue{Key: []byte(d.spaces + name), Value: []byte(value)})
	}
	d.replace(all)
	v, _ := d.View()
	require.Equal(t, want, v.Namespaces)
	require.Len(t, v.Refused, 6)

	// So is one that is too many.
	for n := range directory.NamespacesMax {
		all = append(all, keyValue{Key: fmt.Appendf(nil, "%s%04d", d.spaces, n),
			Value: []byte(`{"priority":1}`)})
	}
	d.replace(all)
	v, _ = d.View()
	require.Equal(t, nobody, v.Namespaces["good"])
	require.Equal(t, nobody, v.Namespaces["empty"])
	require.Equal(t, nobody, v.Namespaces["bad text"])
	require.Equal(t, directory.Namespace{Priority: 1}, v.Namespaces["0000"])
	require.LessOrEqual(t, len(v.Namespaces), entriesMax)
}

// TestEtcdIdentity: a member of etcd that asks for certificates is reached with one alone, and one
// that shows the certificate of another host not at all.
func TestEtcdIdentity(t *testing.T) {
	authority, pair, err := testkit.NewAuthority("etcd", time.Hour)
	require.NoError(t, err)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(ca, pair.Cert, 0o600))
	files := func(host string) (cert, key string) {
		pair, _, err := authority.Issue(testkit.Member{Name: "member", Hosts: []string{host},
			Valid: time.Hour})
		require.NoError(t, err)
		cert, key, err = pair.Store(t.TempDir(), "member")
		require.NoError(t, err)
		return cert, key
	}
	m := etcdtest.StartSecure(t, func(host string) (cert, key, authorities string) {
		cert, key = files(host)
		return cert, key, ca
	})
	wrong := etcdtest.StartSecure(t, func(string) (cert, key, authorities string) {
		cert, key = files("elsewhere")
		return cert, key, ca
	})
	cert, key := files("node")
	id, err := identity.FromFiles(cert, key, ca)
	require.NoError(t, err)
	_, err = Open(t.Context(), Config{Endpoints: []string{"http://a:1"}, Identity: id})
	require.ErrorIs(t, err, engine.ErrBounds)

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := Open(ctx, Config{Endpoints: []string{m.URL}, Identity: id,
		Lease: time.Minute})
	require.NoError(t, err) // it has started
	t.Cleanup(d.Close)
	join(t, d, nodeOf("a"))
	await(t, d, has("a"))

	for name, c := range map[string]struct {
		url  string
		id   *identity.Identity
		want string
	}{
		"another host":   {wrong.URL, id, "elsewhere"},
		"no certificate": {m.URL, nil, "tls"},
	} {
		for { // until it has started
			soon, cancel := context.WithTimeout(ctx, 3*time.Second)
			_, err := Open(soon, Config{Endpoints: []string{c.url}, Identity: c.id})
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded, name)
			if !errors.Is(err, syscall.ECONNREFUSED) &&
				!strings.Contains(err.Error(), "no member") {
				require.ErrorContains(t, err, c.want, name)
				break
			}
		}
	}
}
