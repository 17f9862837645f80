// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSilentConnections fills all places of an owner with connections that say nothing: a new
// peer gets in all the same, in place of the oldest.
func TestSilentConnections(t *testing.T) {
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{hello: time.Hour})
	for range handshakesMax + far.cfg.ConnsMax {
		conn, err := net.Dial("tcp", far.address.control[0].String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	p := &pair{near: near, far: far}
	eventually(t, "a new peer", func() bool {
		_, err := p.near.Connect(t.Context(), p.far.Addr())
		return err == nil
	})
}

// TestOneHostLeavesPlacesForOthers: one host that says nothing over more connections than there are
// places keeps no other out.
func TestOneHostLeavesPlacesForOthers(t *testing.T) {
	near, far := openFakeBackend(t, Config{}), openFakeBackend(t, Config{hello: time.Hour})
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for range 10 * handshakesMax {
		conn, err := d.Dial("tcp", far.address.control[0].String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	for range 20 {
		c, err := near.Connect(t.Context(), far.Addr())
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
}
