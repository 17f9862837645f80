// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// club is an authority with its file, of which tests make members.
type club struct {
	t  *testing.T
	a  *testkit.Authority
	ca string
}

func newClub(t *testing.T, name string) *club {
	t.Helper()
	a, pair, err := testkit.NewAuthority(name, time.Hour)
	check(t, err)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	check(t, os.WriteFile(ca, pair.Cert, 0o600))
	return &club{t, a, ca}
}

// files makes those of a member, once more where they are there.
func (c *club) files(dir, name string) (cert, key string) {
	c.t.Helper()
	pair, _, err := c.a.Issue(testkit.Member{Name: name, Valid: time.Hour})
	check(c.t, err)
	cert, key, err = pair.Store(dir, name)
	check(c.t, err)
	return cert, key
}

func (c *club) member(name string) *identity.Identity {
	c.t.Helper()
	cert, key := c.files(c.t.TempDir(), name)
	id, err := identity.FromFiles(cert, key, c.ca)
	check(c.t, err)
	return id
}

func as(id *identity.Identity) func(*Config) { return func(c *Config) { c.Identity = id } }

// secured is an engine that serves a region to members.
func secured(t *testing.T, c *club, change ...func(*Config)) (*Engine, net.Listener) {
	t.Helper()
	e := open(t, "server", append(change, as(c.member("server")))...)
	register(t, e, "secret-region", 4096)
	l := listen(t, "tcp", "127.0.0.1:0")
	serve(t, e, l)
	return e, l
}

func nobodyCame(t *testing.T, e *Engine) {
	t.Helper()
	require.Zero(t, e.Stats().Peers, "peers came of it")
}

// Plain text over a network must be asked for, on both sides.
func TestPlainTextIsAskedFor(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	err := open(t, "server").Serve(within(t), l)
	wantErr(t, err, os.ErrPermission, "Config.Plaintext")
	l = listen(t, "tcp", "127.0.0.1:0")
	serve(t, open(t, "server", func(c *Config) { c.Plaintext = true }), l)
	_, err = open(t, "dialler").Dial(within(t), "tcp", l.Addr().String())
	wantErr(t, err, os.ErrPermission, "Config.Identity")
	cfg := Config{Identity: newClub(t, "ours").member("x"), Plaintext: true, Backends: nil}
	require.ErrorIs(t, second(Open(cfg)), ErrBounds, "both")
}

// Who is no member learns why, and nothing else; the server learns nothing of it.
func TestDiallersThatAreNoMembers(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	ours, theirs := newClub(t, "ours"), newClub(t, "theirs")
	e, l := secured(t, ours)
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"of another authority": {as(theirs.member("stranger")),
			`certificate of 127.0.0.1 is signed by another authority: "ours" (key `},
		"in plain text": {func(c *Config) { c.Plaintext = true }, "it may ask for TLS"},
	} {
		_, err := open(t, "stranger", c.change).Dial(within(t), "tcp", l.Addr().String())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q in it", name, err, c.want)
		}
	}
	both := theirs.member("naive") // trusts whoever answers, as a stranger may
	conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true,
		MinVersion: tls.VersionTLS13})
	check(t, err)
	if _, err = open(t, "stranger", as(both)).DialConn(within(t), conn); err == nil ||
		!strings.Contains(err.Error(), "asks for a certificate, and we show none") {
		t.Errorf("without a certificate: %v", err)
	}
	nobodyCame(t, e)
	p, err := open(t, "friend", as(ours.member("friend"))).Dial(within(t), "tcp", l.Addr().String())
	check(t, err)
	remote(t, p, "secret-region")
	check(t, p.Close())
}

// A listener that speaks TLS but asks for no certificate would give everybody a description.
func TestListenersThatAskForNoCertificate(t *testing.T) {
	certificate, roots := selfSigned(t)
	e := open(t, "server")
	l := tls.NewListener(listen(t, "tcp", "127.0.0.1:0"),
		&tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13})
	serve(t, e, l)
	conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{RootCAs: roots,
		ServerName: "sluice"})
	check(t, err)
	wantErr(t, second(open(t, "stranger").DialConn(within(t), conn)), ErrNoRoute,
		"RequireAndVerifyClientCert")
	nobodyCame(t, e)
}

// A dialer gives its description to nobody whose certificate it has not verified.
func TestServersThatAreNoMembers(t *testing.T) {
	theirs := newClub(t, "theirs")
	_, l := secured(t, theirs)
	between := listen(t, "tcp", "127.0.0.1:0")
	var heard bytes.Buffer
	done := relay(t, between, l.Addr().String(), &heard)
	e := open(t, "dialler", as(newClub(t, "ours").member("dialler")))
	register(t, e, "our-secret", 4096)
	_, err := e.Dial(within(t), "tcp", between.Addr().String())
	require.ErrorIs(t, err, os.ErrPermission, "dialled a server of another authority")
	<-done
	require.False(t, bytes.Contains(heard.Bytes(), []byte("our-secret")), "it was told of a region")
}

// relay passes one connection on and keeps what the dialer says.
func relay(t *testing.T, l net.Listener, to string, heard io.Writer) <-chan struct{} {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		near, err := l.Accept()
		if err != nil {
			return
		}
		defer near.Close()
		far, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer far.Close()
		var both sync.WaitGroup
		both.Go(func() {
			_, _ = io.Copy(io.MultiWriter(far, heard), near)
			_ = far.(*net.TCPConn).CloseWrite()
		})
		both.Go(func() { _, _ = io.Copy(near, far); _ = near.(*net.TCPConn).CloseWrite() })
		both.Wait()
	}()
	return done
}

// Strangers who take all places make room for members; none of them is given a byte of a
// description, whatever it says.
func TestStrangersTakeNoPlaces(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	ours := newClub(t, "ours")
	e, l := secured(t, ours, func(c *Config) { c.HandshakesMax, c.HandshakeTimeout = 4, limit })
	say := [][]byte{
		nil, {0x16, 3, 1, 2, 0}, []byte("GET / HTTP/1.1\r\n\r\n"), bytes.Repeat([]byte{0xff},
			1<<16),
		binary.LittleEndian.AppendUint32([]byte{session.DescriptionFrame}, 1<<31),
	}
	var strangers []net.Conn
	for i := range 20 {
		c, err := net.Dial("tcp", l.Addr().String())
		check(t, err)
		defer c.Close()
		strangers = append(strangers, c)
		if text := say[i%len(say)]; len(text) > 0 {
			_, _ = c.Write(text) // one that is refused is hung up on meanwhile
		}
		if i%len(say) == 1 { // one byte now and then
			go func() {
				for _, err := c.Write([]byte{0}); err == nil; _, err = c.Write([]byte{0}) {
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
	}
	p, err := open(t, "friend", as(ours.member("friend")), func(c *Config) {
		c.ConnectTimeout = limit
	}).Dial(within(t), "tcp", l.Addr().String())
	check(t, err)
	check(t, p.Close())
	for i, c := range strangers {
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		answer, _ := io.ReadAll(c)
		if bytes.Contains(answer, []byte("secret-region")) || len(answer) > 64 {
			// an alert has 7 bytes
			t.Errorf("stranger %d was told %q", i, answer)
		}
	}
	for end := time.Now().Add(limit); e.Stats().Peers > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	nobodyCame(t, e)
}
