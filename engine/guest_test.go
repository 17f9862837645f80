// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// plainServer serves in plain text, by tcp and what a change adds.
func plainServer(t *testing.T, change func(*Config)) (*Engine, net.Listener) {
	t.Helper()
	b, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	require.NoError(t, err)
	e := open(t, "server", func(c *Config) {
		c.Plaintext, c.Backends = true, []driver.Backend{b}
		change(c)
	})
	l := listen(t, "tcp", "127.0.0.1:0")
	serve(t, e, l)
	return e, l
}

// introduces sends a description as a dialer does.
func introduces(t *testing.T, conn net.Conn, d *wire.Description) {
	t.Helper()
	b, err := wire.Encode(nil, d)
	require.NoError(t, err)
	require.NoError(t, writeFrame(conn, frameMark, append(b, make([]byte, 16)...)))
}

// refusal reads what the server says until it hangs up, and returns its last words.
func refusal(t *testing.T, conn net.Conn) string {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(limit)))
	var last []byte
	for {
		head := make([]byte, frameHead)
		if _, err := io.ReadFull(conn, head); err != nil {
			return string(last)
		}
		last = make([]byte, binary.LittleEndian.Uint32(head[1:]))
		_, err := io.ReadFull(conn, last)
		require.NoError(t, err)
	}
}

// TestStrangersProbeNothing: by neither the words nor the time of an answer does a stranger learn
// what is at an address that it has the server connect to. The program does.
func TestStrangersProbeNothing(t *testing.T) {
	const patience = 2 * time.Second
	why := make(chan error, 1)
	_, l := plainServer(t, func(c *Config) {
		c.HandshakeTimeout = patience
		c.OnRefused = func(_ net.Addr, err error) { why <- err }
	})
	there := func(open bool) []byte {
		b, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
		require.NoError(t, err)
		places, _, err := tcp.Places(b.Addr())
		require.NoError(t, err)
		require.NoError(t, b.Close())
		if open {
			s := listen(t, "tcp", places[0])
			go func() {
				for c, err := s.Accept(); err == nil; c, err = s.Accept() {
					_, _ = c.Write([]byte("220 inner.example ESMTP\r\n"))
					_ = c.Close()
				}
			}()
		}
		return b.Addr()
	}
	for _, open := range []bool{false, true} {
		conn, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		defer conn.Close()
		begin := time.Now()
		introduces(t, conn, &wire.Description{Engine: wire.ID{9}, Host: wire.ID{9}, Name: "x",
			NotifyMax: 1, Backends: []wire.Backend{{Name: "tcp", Addr: there(open)}}})
		require.Equal(t, strangerRefusal, refusal(t, conn))
		require.GreaterOrEqual(t, time.Since(begin), patience-time.Second)
		require.Equal(t, !open, strings.Contains((<-why).Error(), "refused"))
	}
}

// TestMembersAreToldWhy.
func TestMembersAreToldWhy(t *testing.T) {
	path := serveUnix(t, open(t, "server"))
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer conn.Close()
	introduces(t, conn, &wire.Description{Engine: wire.ID{9}, Name: "x", NotifyMax: 1})
	require.Contains(t, refusal(t, conn), "no backend of this name")
}

// TestOneHostHasHalfOfTheGuests: engines of one host that come through Serve take half of the
// places of peers, and another host finds room. What they held is free once they have left.
func TestOneHostHasHalfOfTheGuests(t *testing.T) {
	came := make(chan *Peer, 4)
	e, l := plainServer(t, func(c *Config) {
		c.PeersMax, c.HandshakeTimeout = 4, limit
		c.OnPeer = func(p *Peer) { came <- p }
	})
	friend := open(t, "friend", overPlainTCP(t))
	dial := func(from string) error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		conn, err := d.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		_, err = friend.DialConn(within(t), conn)
		return err
	}
	require.NoError(t, dial("127.0.0.2"))
	require.NoError(t, dial("127.0.0.2"))
	require.ErrorContains(t, dial("127.0.0.2"), "2 peers of one host, raise Config.PeersMax")
	require.NoError(t, dial("127.0.0.3"))
	for range 2 {
		require.NoError(t, (<-came).Close())
	}
	require.NoError(t, dial("127.0.0.2"))
	for range 2 {
		require.NoError(t, (<-came).Close())
	}
	until(t, "all is free", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.guests.peers.Sum() == 0 && e.guests.bytes.Sum() == 0
	})
}

// overPlainTCP is for an engine of a stranger.
func overPlainTCP(t *testing.T) func(*Config) {
	return func(c *Config) {
		b, err := tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
		require.NoError(t, err)
		c.Plaintext, c.Backends = true, []driver.Backend{b}
	}
}

// TestDescriptionsOfOneHost take half of what all may, while they are read and as long as their
// Peers stand.
func TestDescriptionsOfOneHost(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e := open(t, "e", func(c *Config) {
		c.Backends, c.DescriptionMax = []driver.Backend{b}, 1<<10
	})
	here, there := session.Host{}, session.HostOf(comesFrom{ip: "10.0.0.1"})
	read := func(host session.Host, n int) (*guest, error) {
		g := &guest{e: e, host: host}
		_, err := io.ReadAll(g.reader(strings.NewReader(strings.Repeat("x", n))))
		return g, err
	}
	first, err := read(there, 8<<10)
	require.NoError(t, err)
	second, err := read(there, 1)
	require.ErrorIs(t, err, ErrFull)
	second.leave()
	_, err = read(here, 8<<10)
	require.NoError(t, err)
	first.leave()
	first.leave()
	_, err = read(there, 8<<10)
	require.NoError(t, err)
}

// comesFrom is a connection that has an address alone.
type comesFrom struct {
	net.Conn
	ip string
}

func (c comesFrom) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.ip), Port: 1} }
