// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/kv/directory"
)

// open opens a directory whose nodes stay there also on a machine that stalls for some seconds.
func open(t *testing.T, members []*etcdtest.Member) *Directory {
	t.Helper()
	return openFor(t, members, time.Minute)
}

func openFor(t *testing.T, members []*etcdtest.Member, lease time.Duration) *Directory {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := Open(ctx, Config{Endpoints: etcdtest.URLs(members), Lease: lease})
	require.NoError(t, err)
	t.Cleanup(d.Close)
	return d
}

func nodeOf(name string) directory.Node {
	return directory.Node{Name: name, Addresses: []string{"tcp:127.0.0.1:7000"}, Weight: 1}
}

func join(t *testing.T, d *Directory, n directory.Node) *Member {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	m, err := d.Join(ctx, n)
	require.NoError(t, err)
	t.Cleanup(m.stop)
	return m
}

// await waits for a view.
func await(t *testing.T, d *Directory, is func(v *directory.View) bool) *directory.View {
	t.Helper()
	limit := time.After(2 * time.Minute)
	for {
		v, changed := d.View()
		if is(v) {
			return v
		}
		select {
		case <-changed:
		case <-limit:
			require.Fail(t, "no such view", "%+v", v)
		}
	}
}

// has reports whether a view has these nodes.
func has(names ...string) func(v *directory.View) bool {
	return func(v *directory.View) bool {
		if len(v.Nodes) != len(names) {
			return false
		}
		for k, name := range names {
			if v.Nodes[k].Name != name {
				return false
			}
		}
		return true
	}
}

func put(t *testing.T, d *Directory, key, value string) {
	t.Helper()
	_, err := askAny[struct{}](t.Context(), d.c, "kv/put", map[string]any{"key": []byte(key),
		"value": []byte(value)})
	require.NoError(t, err)
}

// TestJoin: what joins, changes and leaves is in each view, and what is no good in none.
func TestJoin(t *testing.T) {
	members := etcdtest.Start(t, 1)
	d, other := open(t, members), open(t, members)
	a := join(t, d, nodeOf("a"))
	v := await(t, other, has("a"))
	first := v.Nodes[0].Generation
	require.NotZero(t, first)
	require.NoError(t, v.Trouble)
	a.Update(directory.Load{Running: 4, Memory: 50}, 7)
	await(t, other, func(v *directory.View) bool {
		return v.Nodes[0].Load.Running == 4 && v.Nodes[0].Weight == 7
	})
	b := join(t, other, nodeOf("b"))
	await(t, d, has("a", "b"))

	// Two processes of one name: another address waits, the same one is that of the next process.
	elsewhere := nodeOf("a")
	elsewhere.Addresses = []string{"tcp:127.0.0.2:7000"}
	waits := Member{d: other, node: elsewhere}
	err := waits.step(t.Context())
	require.ErrorIs(t, err, engine.ErrBusy)
	require.ErrorContains(t, err, "another process has the name")
	require.NoError(t, waits.release(t.Context()))
	soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = other.Join(soon, elsewhere)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	again := join(t, other, nodeOf("a"))
	await(t, d, func(v *directory.View) bool { return v.Nodes[0].Generation > first })
	for a.Trouble() == nil {
		runtime.Gosched()
	}
	require.ErrorIs(t, a.Trouble(), engine.ErrBusy)

	// A process whose clock is behind that of the one before it.
	ahead := nodeOf("clock")
	ahead.Generation = time.Now().Add(time.Minute).UnixNano()
	text, err := json.Marshal(&ahead)
	require.NoError(t, err)
	put(t, d, "sluice/nodes/clock", string(text))
	behind := join(t, d, nodeOf("clock"))
	await(t, other, func(v *directory.View) bool {
		return has("a", "b", "clock")(v) && v.Nodes[2].Generation > ahead.Generation
	})
	require.NoError(t, behind.step(t.Context()))
	require.NoError(t, behind.Leave(t.Context()))
	await(t, d, has("a", "b"))

	// Namespaces, and nonsense.
	put(t, d, "sluice/namespaces/org/model", `{"copies":2,"memory_quota":4096}`)
	put(t, d, "sluice/namespaces/worse", `{"copies":99}`)
	put(t, d, "sluice/nodes/c", `{"name":"d"}`)
	put(t, d, "sluice/nodes/e", `what`)
	v = await(t, other, func(v *directory.View) bool { return len(v.Refused) == 3 })
	require.Equal(t, map[string]directory.Namespace{"org/model": {Copies: 2, MemoryQuota: 4096}},
		v.Namespaces)
	require.Len(t, v.Nodes, 2)

	require.NoError(t, a.Leave(t.Context()))
	await(t, d, has("a", "b"))
	require.NoError(t, again.Leave(t.Context()))
	await(t, d, has("b"))
	require.NoError(t, b.Leave(t.Context()))
	await(t, d, has())
	killed := join(t, openFor(t, members, 0), nodeOf("k"))
	await(t, d, has("k"))
	killed.stop() // as a process that is killed
	await(t, d, has())
}

// TestEtcdLost: while no majority answers the last view stays and says so, and nothing joins; one
// that answers again heals all, also one that has forgotten everything.
func TestEtcdLost(t *testing.T) {
	members := etcdtest.Start(t, 3)
	d := open(t, members)
	a := join(t, d, nodeOf("a"))
	await(t, d, has("a"))

	// One is gone: the one that the view comes from.
	members[0].Kill()
	b := join(t, d, nodeOf("b"))
	await(t, d, func(v *directory.View) bool { return has("a", "b")(v) && v.Trouble == nil })

	// One more stands still, so that there is no majority: what is left is silent.
	members[1].Signal(syscall.SIGSTOP)
	v := await(t, d, func(v *directory.View) bool { return v.Trouble != nil })
	require.True(t, has("a", "b")(v))
	soon, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := d.Join(soon, nodeOf("c"))
	require.Error(t, err)
	for a.Trouble() == nil || b.Trouble() == nil {
		runtime.Gosched()
	}
	v, _ = d.View()
	require.True(t, has("a", "b")(v))
	members[1].Signal(syscall.SIGCONT)
	v = await(t, d, func(v *directory.View) bool { return v.Trouble == nil })
	require.True(t, has("a", "b")(v))
	join(t, d, nodeOf("c"))
	await(t, d, has("a", "b", "c"))

	// All are gone, and start anew with nothing: the nodes come back before the view has lost them.
	for _, m := range members {
		m.Kill()
		m.Forget()
	}
	await(t, d, func(v *directory.View) bool { return v.Trouble != nil })
	for _, m := range members {
		m.Start()
	}
	v = await(t, d, func(v *directory.View) bool { return v.Trouble == nil })
	require.True(t, has("a", "b", "c")(v))
	fresh := open(t, members)
	await(t, fresh, has("a", "b", "c"))
	require.NoError(t, a.Leave(t.Context()))
	await(t, d, has("b", "c"))
}

// TestOpenRefused: what is no endpoint, and an etcd that does not answer.
func TestOpenRefused(t *testing.T) {
	for _, list := range [][]string{nil, {"127.0.0.1:2379"}, {"http://"}, {"http://a/b"}} {
		_, err := Open(t.Context(), Config{Endpoints: list})
		require.ErrorIs(t, err, engine.ErrBounds, list)
	}
	for _, l := range []time.Duration{-1, leaseMin - 1, leaseMax + 1} {
		_, err := Open(t.Context(), Config{Endpoints: []string{"http://127.0.0.1:1"}, Lease: l})
		require.ErrorIs(t, err, engine.ErrBounds, l)
	}
	soon, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := Open(soon, Config{Endpoints: []string{"http://127.0.0.1:1"}})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "refused")
	_, err = Open(t.Context(), Config{HangUp: true,
		Endpoints: []string{"http://127.0.0.1:1", "http://127.0.0.1:2"}})
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

// startLiar starts what answers as an etcd that has a list, and a watch as a test wants.
func startLiar(t *testing.T, list []keyValue, watch func(w io.Writer)) (url string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if !strings.HasSuffix(q.URL.Path, "/watch") {
			_ = json.NewEncoder(w).Encode(rangeAnswer{List: list})
			return
		}
		_, _ = io.Copy(io.Discard, q.Body) // else the server does not see that the client goes
		if watch != nil {
			watch(w)
			_ = http.NewResponseController(w).Flush()
		}
		<-q.Context().Done()
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// entryOf is the entry of a node.
func entryOf(name string) keyValue {
	node := nodeOf(name)
	value, _ := json.Marshal(&node)
	return keyValue{Key: []byte("sluice/nodes/" + name), Value: value}
}

// TestWatchThatNeverBegins: a member that answers all but the watch is none to follow, as one
// behind a proxy that keeps back what it has not as a whole.
func TestWatchThatNeverBegins(t *testing.T) {
	hangs := startLiar(t, []keyValue{entryOf("old")}, nil)
	begins := startLiar(t, []keyValue{entryOf("new")}, func(w io.Writer) {
		_ = json.NewEncoder(w).Encode(stream[watchAnswer]{Result: watchAnswer{Created: true}})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := Open(ctx, Config{Endpoints: []string{hangs, begins}})
	require.NoError(t, err)
	t.Cleanup(d.Close)
	v := await(t, d, has("new"))
	require.NoError(t, v.Trouble)
}

// TestTooManyEntries: the view stays as it was, and says so.
func TestTooManyEntries(t *testing.T) {
	many := make([]keyValue, entriesMax+1)
	for k := range many {
		many[k] = entryOf(fmt.Sprint("a", k))
	}
	events := make([]event, len(many))
	for k := range events {
		events[k].Of = many[k]
	}
	url := startLiar(t, []keyValue{entryOf("b")}, func(w io.Writer) {
		_ = json.NewEncoder(w).Encode(stream[watchAnswer]{Result: watchAnswer{Events: events}})
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	d, err := Open(ctx, Config{Endpoints: []string{url}})
	require.NoError(t, err)
	t.Cleanup(d.Close)
	v := await(t, d, func(v *directory.View) bool { return v.Trouble != nil })
	require.True(t, has("b")(v))
	require.ErrorIs(t, v.Trouble, engine.ErrBounds)

	require.ErrorIs(t, d.follow(ctx, startLiar(t, many, nil)), engine.ErrBounds)
}

// TestForgotten: a node that etcd has forgotten leaves in time, also where no watch lasts a beat.
func TestForgotten(t *testing.T) {
	d := &Directory{nodes: "sluice/nodes/", changed: make(chan struct{}), lease: time.Minute,
		come: make(chan struct{}), gone: map[string]time.Time{}}
	d.replace([]keyValue{entryOf("a")})
	d.replace(nil)
	v, _ := d.View()
	require.True(t, has("a")(v))
	require.Greater(t, time.Until(d.gone[d.nodes+"a"]), d.lease/2, "it has no time to come back")
	d.gone[d.nodes+"a"] = time.Now().Add(-time.Second)
	d.replace(nil)
	v, _ = d.View()
	require.True(t, has()(v))
	require.Empty(t, d.gone)
}
