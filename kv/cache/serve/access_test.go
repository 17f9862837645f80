// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/cache"
)

// logged is what a log was told.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// lists are what a test has Config.Access say of "model", and of a namespace without a name.
type lists struct{ atomic.Pointer[Access] }

func (l *lists) of(name string) Access {
	if name == "model" || name == "" {
		return *l.Load()
	}
	return Access{}
}

// requestsOf are all requests about a namespace, and what each takes.
var requestsOf = map[kind]rights{kindMatch: mayRead, kindLoad: mayRead, kindPrefetch: mayRead,
	kindPin: mayRead, kindEstimate: mayRead, kindBlocks: mayRead, kindBlock: mayRead,
	kindStore: mayWrite, kindReplace: mayWrite, kindRemove: mayWrite, kindHint: mayWrite,
	kindEnvelope: mayWrite}

// TestAccess: each request of a client that a list does not name is refused, also once it has the
// namespace open, and says nothing of what is there.
func TestAccess(t *testing.T) {
	ctx := t.Context()
	var now lists
	now.Store(&Access{})
	log := &logged{}
	c, s, path := openWhole(t, func(cfg *Config) {
		cfg.Access, cfg.Log = now.of, slog.New(slog.NewTextHandler(log, nil))
	})
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 8)
	u.storeAndLoad(t, keys)
	pin, err := u.Pin(ctx, keys[:1], time.Minute)
	require.NoError(t, err)

	nobody := []string{}
	for name, x := range map[string]struct {
		Access
		may rights
	}{
		"nobody":      {Access{Readers: nobody, Writers: nobody}, 0},
		"others":      {Access{Readers: []string{"a"}, Writers: []string{"b"}}, 0},
		"reader":      {Access{Readers: []string{"a", Local}, Writers: nobody}, mayRead},
		"writer":      {Access{Readers: nobody, Writers: []string{Local}}, mayWrite},
		"all read":    {Access{Writers: nobody}, mayRead},
		"all":         {Access{}, mayAll},
		"all, listed": {Access{Readers: []string{Local}, Writers: []string{Local}}, mayAll},
	} {
		now.Store(&x.Access)
		require.NoError(t, s.Reassign())
		for what, takes := range requestsOf {
			texts := map[string]bool{}
			for _, k := range [][]cache.Key{keys[:1], keysOf(99, 1)} { // there, and not
				_, err := u.Client.ask(ctx, what, request{number: u.number, keys: k})
				refused := errors.Is(err, os.ErrPermission)
				require.Equal(t, takes&x.may == 0, refused, "%s: %v: %v", name, what, err)
				if refused {
					require.ErrorContains(t, err, Local)
					texts[err.Error()] = true
				}
			}
			require.LessOrEqual(t, len(texts), 1, "%s: %v", name, what)
		}
		again, err := u.Client.Namespace(ctx, "model", [32]byte{1})
		require.Equal(t, x.may == 0, errors.Is(err, os.ErrPermission), name)
		if err == nil {
			require.NoError(t, again.Close())
		}
		_, err = u.Find(ctx, u.Space.digestOf(c))
		require.Equal(t, x.may == 0, errors.Is(err, os.ErrPermission), name)
		_, err = u.Client.Namespace(ctx, "other", [32]byte{1})
		require.NoError(t, err)
	}
	require.NoError(t, pin.Close())

	// The log is told who, what and of which namespace, and no more than it takes.
	now.Store(&Access{Readers: nobody, Writers: nobody})
	require.NoError(t, s.Reassign())
	refusals := 0
	for end := time.Now().Add(time.Minute); refusals < 1000 ||
		!strings.Contains(log.String(), "request=match") && time.Now().Before(end); refusals++ {
		_, err := u.Match(ctx, keys)
		require.ErrorIs(t, err, os.ErrPermission)
	}
	require.Contains(t, log.String(), "namespace=model")
	require.Contains(t, log.String(), "request=match")
	require.Contains(t, log.String(), "engine=user")
	require.Less(t, strings.Count(log.String(), "\n"), refusals)

	require.NoError(t, u.Space.Close()) // which takes no right
	require.NoError(t, u.Client.Close(ctx))
}

// digestOf is the digest of a namespace of a test, of which the cache has one of that name.
func (s *Space) digestOf(c *cache.Cache) [16]byte {
	for _, i := range c.Spaces() {
		if i.Name == "model" {
			return i.Digest
		}
	}
	return [16]byte{}
}

// TestSalt: a namespace is another one by another salt, and its digest is not the one that who
// knows its name and its geometry can make.
func TestSalt(t *testing.T) {
	ctx := t.Context()
	var now lists
	now.Store(&Access{Salt: []byte("salt")})
	c, _, path := openWhole(t, func(cfg *Config) { cfg.Access = now.of })
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 4)
	u.storeAndLoad(t, keys)
	require.NotEqual(t, cache.DigestOf("model", [32]byte{1}), c.Spaces()[0].Digest)
	require.Nil(t, c.Space(cache.DigestOf("model", [32]byte{1})))

	other, err := openUser(ctx, path)
	require.NoError(t, err)
	found, err := other.Match(ctx, keys)
	require.NoError(t, err)
	require.Equal(t, 4, found.Prefix)
	for _, salt := range [][]byte{nil, []byte("another")} {
		now.Store(&Access{Salt: salt})
		space, err := other.Client.Namespace(ctx, "model", [32]byte{1})
		require.NoError(t, err)
		found, err = space.Match(ctx, keys)
		require.NoError(t, err)
		require.Zero(t, found.Prefix)
	}
	require.NoError(t, u.Client.Close(ctx))
	require.NoError(t, other.Client.Close(ctx))
}

// TestAccessByCertificate: over a network the names in a certificate count, and one that is called
// like Local does not.
func TestAccessByCertificate(t *testing.T) {
	authority, pair, err := testkit.NewAuthority("cluster", time.Hour)
	require.NoError(t, err)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(ca, pair.Cert, 0o600))
	open := func(name string) *engine.Engine {
		pair, _, err := authority.Issue(testkit.Member{Name: name, Valid: time.Hour})
		require.NoError(t, err)
		cert, key, err := pair.Store(t.TempDir(), name)
		require.NoError(t, err)
		id, err := identity.FromFiles(cert, key, ca)
		require.NoError(t, err)
		b, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0", Identity: id})
		require.NoError(t, err)
		e, err := engine.Open(engine.Config{Name: name, Identity: id,
			Backends: []driver.Backend{b}})
		require.NoError(t, err)
		return e
	}
	e := open("node")
	c, err := cache.Open(t.Context(), cache.Config{Engine: e, Memory: cache.MemoryConfig{
		Path: filepath.Join(t.TempDir(), "memory"), Bytes: 32 * blockBytes,
		Extent: 8 * blockBytes}, Blocks: 64})
	require.NoError(t, err)
	log := &logged{}
	s, err := New(Config{Cache: c, Engine: e, Log: slog.New(slog.NewTextHandler(log, nil)),
		Access: func(string) Access {
			return Access{Readers: []string{"a", "b", Local}, Writers: []string{"a"}}
		}})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	life, cancel := context.WithCancel(context.Background())
	served, ran := make(chan error, 1), make(chan error, 1)
	go func() { served <- e.Serve(life, l) }()
	go func() { ran <- s.Run(life) }()
	t.Cleanup(func() {
		cancel()
		<-served
		require.NoError(t, <-ran)
		require.NoError(t, c.Close())
		require.NoError(t, e.Close())
	})
	for name, may := range map[string]rights{"a": mayAll, "b": mayRead, "c": 0, Local: 0} {
		e := open(name)
		u, err := Dial(t.Context(), e, "tcp", l.Addr().String())
		require.NoError(t, err)
		space, err := u.Namespace(t.Context(), "model", [32]byte{1})
		require.Equal(t, may == 0, errors.Is(err, os.ErrPermission), "%s: %v", name, err)
		if err == nil {
			_, err = space.Match(t.Context(), keysOf(1, 1))
			require.Equal(t, may&mayRead == 0, errors.Is(err, os.ErrPermission), name)
			err = space.Remove(t.Context(), keysOf(1, 1))
			require.Equal(t, may&mayWrite == 0, errors.Is(err, os.ErrPermission), name)
		}
		_, err = u.Report(t.Context())
		require.ErrorIs(t, err, os.ErrPermission, name)
		require.NoError(t, u.Close(t.Context()))
		require.NoError(t, e.Close())
	}
	require.Contains(t, log.String(), `who="[\"c\"]"`)
	require.Contains(t, log.String(), "serial number")
}

// nobodys lets nobody use a namespace.
func nobodys(string) Access { return Access{Readers: []string{}, Writers: []string{}} }

// TestLongName: the name of a namespace, which may be as long as a message, is cut in the log.
func TestLongName(t *testing.T) {
	log := &logged{}
	_, _, path := openWhole(t, func(cfg *Config) {
		cfg.Access, cfg.Log = nobodys, slog.New(slog.NewTextHandler(log, nil))
	})
	e, err := openEngine("user")
	require.NoError(t, err)
	u, err := Dial(t.Context(), e, "unix", path)
	require.NoError(t, err)
	_, err = u.Namespace(t.Context(), "model"+strings.Repeat("x", 1<<20), [32]byte{1})
	require.ErrorIs(t, err, os.ErrPermission)
	require.Contains(t, log.String(), "modelxxx")
	require.NotContains(t, log.String(), strings.Repeat("x", nameShown))
	require.NoError(t, u.Close(t.Context()))
	require.NoError(t, e.Close())
}

// TestLogThatHangs: a log that takes nothing holds one refusal up, and no other.
func TestLogThatHangs(t *testing.T) {
	took, goOn := make(chan struct{}, 1), make(chan struct{})
	_, _, path := openWhole(t, func(cfg *Config) {
		cfg.Access = nobodys
		cfg.Log = slog.New(slog.NewTextHandler(writes(func() { took <- struct{}{}; <-goOn }), nil))
	})
	e, err := openEngine("user")
	require.NoError(t, err)
	u, err := Dial(t.Context(), e, "unix", path)
	require.NoError(t, err)
	var held sync.WaitGroup
	held.Go(func() {
		_, err := u.Namespace(t.Context(), "first", [32]byte{})
		assert.ErrorIs(t, err, os.ErrPermission)
	})
	<-took
	for range 16 {
		_, err := u.Namespace(t.Context(), "model", [32]byte{})
		require.ErrorIs(t, err, os.ErrPermission)
	}
	close(goOn)
	held.Wait()
	require.NoError(t, u.Close(t.Context()))
	require.NoError(t, e.Close())
}

// writes is what a log writes to that only tells a test of it.
type writes func()

func (w writes) Write(p []byte) (int, error) { w(); return len(p), nil }
