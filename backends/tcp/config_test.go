// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestConfigBounds(t *testing.T) {
	testkit.CheckLeaks(t)
	for _, c := range []struct {
		cfg  Config
		want string // in the error
	}{
		{Config{Plaintext: true, TLS: sharedTLS}, "both"},
		{Config{TLS: &tls.Config{}}, "Certificates"},
		{Config{TLS: &tls.Config{Certificates: make([]tls.Certificate, 1)}}, "RootCAs"},
		{Config{Plaintext: true, Conns: -1}, "Conns"},
		{Config{Plaintext: true, Conns: connsMax + 1}, "Conns"},
		{Config{Plaintext: true, Flight: 1}, "Flight"},
		{Config{Plaintext: true, BatchesMax: -1}, "BatchesMax"},
		{Config{Plaintext: true, MessageMax: messageLimit + 1}, "MessageMax"},
		{Config{Plaintext: true, KeysMax: 1 << 30}, "KeysMax"},
		{Config{Plaintext: true, Grace: time.Microsecond}, "Grace"},
		{Config{Plaintext: true, Failure: -time.Second}, "Failure"},
		{Config{Plaintext: true, Listen: "nowhere"}, "Listen"},
		{Config{Plaintext: true, Listen: "127.0.0.1:9-8"}, "Listen"},
		{Config{Plaintext: true, Listen: "127.0.0.1:0-8"}, "Listen"},
		{Config{Plaintext: true, Listen: "127.0.0.1:70000"}, "Listen"},
	} {
		b, err := New(c.cfg)
		if err == nil {
			_ = b.Close()
		}
		wantError(t, c.want, err, driver.ErrBounds)
		if err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("config %+v: %v, want %q in it", c.cfg, err, c.want)
		}
	}
}

// A range of ports gives each backend the next free one, until there is none.
func TestPortRange(t *testing.T) {
	first := open(t, Config{})
	_, port, err := net.SplitHostPort(first.listener.Addr().String())
	require.NoError(t, err)
	var at int
	if _, err := fmt.Sscan(port, &at); err != nil || at > 65000 {
		t.Fatalf("port %q: %v", port, err)
	}
	second := open(t, Config{Listen: fmt.Sprintf("127.0.0.1:%d-%d", at, at+64)})
	places, secure, err := Places(second.Addr())
	if err != nil || secure || len(places) != 1 || places[0] == first.listener.Addr().String() {
		t.Errorf("places %v, %v (%v): want another port than %d", places, secure, err, at)
	}
	if _, err := New(Config{Plaintext: true, Listen: fmt.Sprintf("127.0.0.1:%d-%d", at,
		at)}); err == nil {
		t.Error("a port that is taken was opened")
	}
}

// Peers are told names as they are, and resolve them.
func TestNames(t *testing.T) {
	testkit.CheckLeaks(t)
	owner := open(t, Config{Advertise: []string{"localhost"}})
	places, _, err := Places(owner.Addr())
	if err != nil || len(places) != 1 || !strings.HasPrefix(places[0], "localhost:") {
		t.Fatalf("places %v (%v), want localhost", places, err)
	}
	_ = dial(t, open(t, Config{}), owner.Addr()).Close()
	everywhere := open(t, Config{Listen: ":0"})
	_ = dial(t, open(t, Config{}), everywhere.Addr()).Close()
	if _, err := New(Config{Plaintext: true, Advertise: make([]string, placesMax+1)}); err == nil {
		t.Error("too many places were advertised")
	}
}

// TestIdleConnections holds what a connection costs on which nothing happens, at both ends, to
// 16 KiB: a goroutine and no buffer.
func TestIdleConnections(t *testing.T) {
	testkit.CheckLeaks(t)
	const peers, conns = 150, 15
	owner := open(t, Config{Conns: conns - 1, Handshakes: 1 << 10})
	near := open(t, Config{Conns: conns - 1})
	m, _ := share(t, owner, 1<<20)
	l, _ := share(t, near, 1<<20)
	used := func() uint64 {
		settleMemory()
		return heapAndStacks()
	}
	warm := dial(t, near, owner.Addr())
	before := used()
	for range peers {
		p := dial(t, near, owner.Addr())
		d := []driver.Desc{{Len: 1 << 20, LocalKey: l.key, RemoteKey: importKey(t, p, m)}}
		if err := p.Submit(1, &driver.Batch{Op: driver.Write, Descs: d}); err != nil {
			// over each connection
			t.Fatal(err)
		}
		require.NoError(t, await(t, near, 1))
	}
	after := used()
	each := (after - before) / (peers * conns * 2)
	t.Logf("an end of an idle connection holds %d bytes", each)
	if each > 16<<10 {
		t.Errorf("an end of an idle connection holds %d bytes, want at most 16 KiB", each)
	}
	_ = warm.Close()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil || len(fds) < peers*conns*2 {
		t.Errorf("%d descriptors are open (%v), want those of %d connections", len(fds), err,
			peers*conns)
	}
}
