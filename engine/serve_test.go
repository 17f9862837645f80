// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// serve runs Serve until the test ends.
func serve(t *testing.T, e *Engine, l net.Listener) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if !errors.Is(err, context.Canceled) && !errors.Is(err, ErrClosed) {
				t.Errorf("serve: %v", err)
			}
		case <-time.After(limit):
			t.Error("Serve does not end")
		}
	})
}

// TestServeOfAnEngineThatCloses ends with ErrClosed, long before Close does.
func TestServeOfAnEngineThatCloses(t *testing.T) {
	served := make(chan error, 1)
	var err error
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{&fake{onRevoke: func(context.Context) error {
			err = <-served
			return nil
		}}}
	})
	register(t, e, "r", 4096)
	l, listenErr := net.Listen("unix", t.TempDir()+"/socket")
	require.NoError(t, listenErr)
	go func() { served <- e.Serve(context.Background(), l) }()
	require.NoError(t, e.Close())
	require.ErrorIs(t, err, ErrClosed)
}

func TestServeAndDial(t *testing.T) {
	certificate, roots := selfSigned(t)
	both := &tls.Config{Certificates: []tls.Certificate{certificate}, RootCAs: roots,
		ClientCAs: roots, ServerName: "sluice",
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13}
	id, err := identity.FromTLS(both)
	check(t, err)
	plain := func(c *Config) { c.Plaintext = true }
	for name, link := range map[string]struct {
		change func(*Config)
		listen func(t *testing.T) net.Listener
		dial   func(e *Engine, l net.Listener) (*Peer, error)
	}{
		"unix": {
			func(*Config) {},
			func(t *testing.T) net.Listener {
				return listen(t, "unix", filepath.Join(t.TempDir(), "s"))
			},
			func(e *Engine, l net.Listener) (*Peer, error) {
				return e.Dial(context.Background(), "unix", l.Addr().String())
			},
		},
		"tcp": {
			plain,
			func(t *testing.T) net.Listener { return listen(t, "tcp", "127.0.0.1:0") },
			func(e *Engine, l net.Listener) (*Peer, error) {
				return e.Dial(context.Background(), "tcp", l.Addr().String())
			},
		},
		"identity": {
			func(c *Config) { c.Identity = id },
			func(t *testing.T) net.Listener { return listen(t, "tcp", "127.0.0.1:0") },
			func(e *Engine, l net.Listener) (*Peer, error) {
				return e.Dial(context.Background(), "tcp", l.Addr().String())
			},
		},
		"tls": {
			func(*Config) {},
			func(t *testing.T) net.Listener {
				return tls.NewListener(listen(t, "tcp", "127.0.0.1:0"), both)
			},
			func(e *Engine, l net.Listener) (*Peer, error) {
				conn, err := tls.Dial("tcp", l.Addr().String(), both)
				if err != nil {
					return nil, err
				}
				return e.DialConn(context.Background(), conn)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.CheckLeaks(t, hostmem.InUse)
			came := make(chan *Peer, 1)
			decode := open(t, "decode", link.change, func(c *Config) {
				c.OnPeer = func(p *Peer) { came <- p }
			})
			prefill := open(t, "prefill", link.change)
			register(t, decode, "kv", 4096)
			src := register(t, prefill, "src", 4096)
			l := link.listen(t)
			serve(t, decode, l)
			p, err := link.dial(prefill, l)
			check(t, err)
			back := <-came
			if p.Name() != "decode" || back.Name() != "prefill" || !p.SameHost() {
				t.Errorf("met %q, which met %q", p.Name(), back.Name())
			}
			tr := transfer(t, p, Write)
			check(t, tr.Add(src, 0, remote(t, p, "kv"), 0, 4096))
			check(t, tr.Notify([]byte("hi")))
			check(t, tr.Post())
			require.Same(t, back, next(t, decode).Peer, "the peer that OnPeer was given")
			check(t, back.Notify(within(t), []byte("hi yourself")))
			require.Same(t, p, next(t, prefill).Peer, "the peer that was dialled")
		})
	}
}

func listen(t *testing.T, network, address string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, address)
	check(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func selfSigned(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"sluice"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	check(t, err)
	parsed, err := x509.ParseCertificate(der)
	check(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, roots
}

// TestStrangersAreBounded has strangers send garbage, too much, or nothing.
func TestStrangersAreBounded(t *testing.T) {
	e := open(t, "server", func(c *Config) {
		c.HandshakeTimeout, c.HandshakesMax, c.Plaintext = 500*time.Millisecond, 2, true
	})
	l := listen(t, "tcp", "127.0.0.1:0")
	serve(t, e, l)
	oversize := binary.LittleEndian.AppendUint32([]byte{session.DescriptionFrame}, 1<<31)
	for name, bytes := range map[string][]byte{
		"garbage": []byte("GET / HTTP/1.1\r\n\r\n"), "nothing": nil, "oversize": oversize,
		"half a frame":    {session.DescriptionFrame, 200, 0, 0, 0, 1, 2},
		"bad description": {session.DescriptionFrame, 4, 0, 0, 0, 'S', 'L', 'U', 'C'},
	} {
		conn, err := net.Dial("tcp", l.Addr().String())
		check(t, err)
		_, err = conn.Write(bytes)
		check(t, err)
		_ = conn.SetReadDeadline(time.Now().Add(limit))
		answer, err := io.ReadAll(conn)
		if err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the server did not hang up: %v", name, err)
		}
		if len(answer) > 0 && answer[0] != session.RefusalFrame {
			t.Errorf("%s: the stranger was given %q", name, answer)
		}
		_ = conn.Close()
	}
	require.Zero(t, e.Stats().Peers, "peers came of it")
	// and it still serves
	friend := open(t, "friend", func(c *Config) { c.Plaintext = true })
	until(t, "a friend is served, however slow it is", func() bool {
		p, err := friend.Dial(within(t), "tcp", l.Addr().String())
		if err == nil {
			check(t, p.Close())
		}
		return err == nil
	})
}

func TestDialRefused(t *testing.T) {
	hasty := open(t, "hasty", func(c *Config) {
		c.ConnectTimeout, c.Plaintext = 200*time.Millisecond, true
	})
	e := open(t, "dialler", func(c *Config) { c.ConnectTimeout, c.Plaintext = limit, true })
	silent := listen(t, "tcp", "127.0.0.1:0")
	require.ErrorIs(t, second(hasty.Dial(within(t), "tcp", silent.Addr().String())),
		context.DeadlineExceeded, "a server that says nothing")
	until(t, "a socket that is not there", func() bool { // 200 ms may be over before the first look
		_, err := hasty.Dial(within(t), "unix", "/nonexistent/socket")
		return errors.Is(err, fs.ErrNotExist) &&
			strings.Contains(err.Error(), "no engine served there for")
	})
	require.ErrorIs(t, second(hasty.Dial(within(t), "udp", "127.0.0.1:1")), ErrNotSupported,
		"another network")
	strict := open(t, "strict", func(c *Config) { c.ConnectTimeout = limit })
	require.ErrorIs(t, second(strict.Dial(within(t), "tcp", "127.0.0.1:1")), fs.ErrPermission,
		"a network without identity or plain text, where nobody listens")
	wrong := listen(t, "tcp", "127.0.0.1:0")
	go func() {
		if c, err := wrong.Accept(); err == nil {
			_, _ = c.Write([]byte("SSH-2.0-OpenSSH"))
			_ = c.Close()
		}
	}()
	require.ErrorIs(t, second(e.Dial(within(t), "tcp", wrong.Addr().String())), ErrCorrupt,
		"a server of another protocol")
}

// TestServeForgetsWhoIsLost has peers come and go that no OnPeer was told of: they
// take no place for ever.
func TestServeForgetsWhoIsLost(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	e := open(t, "server", func(c *Config) { c.PeersMax, c.Plaintext = 2, true })
	l := listen(t, "tcp", "127.0.0.1:0")
	serve(t, e, l)
	friend := open(t, "friend", func(c *Config) { c.Plaintext = true })
	for range 8 {
		p, err := friend.Dial(within(t), "tcp", l.Addr().String())
		check(t, err)
		check(t, p.Close())
		for end := time.Now().Add(limit); e.Stats().Peers > 0; time.Sleep(time.Millisecond) {
			require.False(t, time.Now().After(end), "a peer that is gone is still known")
		}
	}
}

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
	require.NoError(t, session.WriteFrame(conn, session.DescriptionFrame,
		append(b, make([]byte, 16)...)))
}

// refusal reads what the server says until it hangs up, and returns its last words.
func refusal(t *testing.T, conn net.Conn) string {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(limit)))
	var last []byte
	for {
		head := make([]byte, 5)
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
	b := newMem(t)
	e := open(t, "e", func(c *Config) {
		c.Backends, c.DescriptionMax = []driver.Backend{b}, 1<<10
	})
	here, there := session.Host{}, session.HostOf(comesFrom{ip: "10.0.0.1"})
	read := func(host session.Host, n int) (*guest, error) {
		g := &guest{e: e, host: host, from: strings.NewReader(strings.Repeat("x", n))}
		_, err := io.ReadAll(g)
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
