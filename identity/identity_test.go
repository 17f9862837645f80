// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const limit = 30 * time.Second

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func newAuthority(t testing.TB, name string) (*testkit.Authority, testkit.CertificatePair) {
	t.Helper()
	a, pair, err := testkit.NewAuthority(name, time.Hour)
	require.NoError(t, err)
	return a, pair
}

// member writes files of a member of a, who trusts the authorities of trusted, and returns
// cert, key and ca.
func member(t testing.TB, dir string, a *testkit.Authority, m testkit.Member,
	trusted ...testkit.CertificatePair) [3]string {
	t.Helper()
	if m.Valid == 0 {
		m.Valid = time.Hour
	}
	pair, _, err := a.Issue(m)
	require.NoError(t, err)
	var ca []byte
	for _, p := range trusted {
		ca = append(ca, p.Cert...)
	}
	cert, key, err := pair.Store(dir, m.Name)
	require.NoError(t, err)
	file := filepath.Join(dir, m.Name+"-ca.pem")
	require.NoError(t, os.WriteFile(file, ca, 0o600))
	return [3]string{cert, key, file}
}

func fromFiles(t testing.TB, f [3]string) *Identity {
	t.Helper()
	return must(FromFiles(f[0], f[1], f[2]))(t)
}

// meet has two sides shake hands and say a byte each, and returns what went wrong on each.
func meet(t testing.TB, caller, called *Identity, host string) (callerErr, calledErr error) {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	answered := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			answered <- err
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(limit))
		secure, err := called.Answer(ctx, conn)
		if err == nil {
			_, err = secure.Write([]byte{1})
		}
		answered <- err
	}()
	conn := must(net.Dial("tcp", l.Addr().String()))(t)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(limit))
	secure, callerErr := caller.Call(ctx, conn, host)
	if callerErr == nil {
		_, err := io.ReadFull(secure, make([]byte, 1))
		callerErr = caller.Explain(err, hostOf(conn))
	}
	_ = conn.Close()
	return callerErr, <-answered
}

func TestMembersMeet(t *testing.T) {
	a, ca := newAuthority(t, "ours")
	one := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "one"}, ca))
	two := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "two",
		Hosts: []string{"two.test", "127.0.0.1"}}, ca))
	if x, y := meet(t, one, two, "anything"); x != nil || y != nil {
		t.Errorf("members of one authority: %v, %v", x, y)
	}
	strict := one.CheckHost()
	for _, host := range []string{"two.test", "127.0.0.1", ""} { // "" is what was dialled
		if x, y := meet(t, strict, two, host); x != nil || y != nil {
			t.Errorf("host %q: %v, %v", host, x, y)
		}
	}
	x, _ := meet(t, strict, two, "three.test")
	if x == nil ||
		!strings.Contains(x.Error(), `is for two.test, 127.0.0.1, not for "three.test"`) {
		t.Errorf("another host: %v", x)
	}
	if x, y := meet(t, one.CheckName("two.test"), two, "10.0.0.9"); x != nil || y != nil {
		t.Errorf("by its name: %v, %v", x, y)
	}
	x, _ = meet(t, one.CheckName("three.test"), two, "two.test")
	if x == nil || !strings.Contains(x.Error(), `not for "three.test"`) {
		t.Errorf("another name: %v", x)
	}
	if f := two.Facts(); f.Name != "two" || f.Issuer != "ours" || len(f.Hosts) != 2 ||
		f.NotAfter.Before(time.Now()) {
		t.Errorf("facts: %+v", f)
	}
}

// Each mistake is named by who finds it and, where TLS tells the other side, by that as well.
func TestStrangersAreNamed(t *testing.T) {
	a, ca := newAuthority(t, "ours")
	b, foreignCA := newAuthority(t, "theirs")
	good := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "good"}, ca))
	foreign := fromFiles(t, member(t, t.TempDir(), b, testkit.Member{Name: "foreign"}, foreignCA,
		ca))
	naive := fromFiles(t, member(t, t.TempDir(), b, testkit.Member{Name: "naive"}, foreignCA))
	pair, _, err := a.Issue(testkit.Member{Name: "late", From: time.Now().Add(-2 * time.Hour),
		Valid: time.Hour})
	require.NoError(t, err)
	base := good.source.current().called.Clone()
	base.Certificates = []tls.Certificate{must(tls.X509KeyPair(pair.Cert, pair.Key))(t)}
	late := must(FromTLS(base))(t)
	base = base.Clone()
	base.Certificates, base.GetCertificate = nil, func(*tls.ClientHelloInfo) (*tls.Certificate,
		error) {
		return nil, errors.New("none")
	}
	none := must(FromTLS(base))(t)
	for name, c := range map[string]struct {
		caller, called *Identity
		byCaller       string
		byCalled       string
	}{
		"a caller of another authority": {foreign, good, "refuses our certificate " +
			"(\"foreign\", signed by \"theirs\"", "signed by another authority: \"theirs\" (key "},
		"a called one of another": {good, naive, "certificate of 127.0.0.1 is signed by " +
			"another authority: \"theirs\" (key ", ""},
		"a caller that has expired": {late, good, "refuses our certificate (\"late\"",
			"certificate of 127.0.0.1 (\"late\"): it was valid until"},
		"a called one that has expired": {good, late, "certificate of 127.0.0.1 (\"late\"): it " +
			"was valid until", "refuses our certificate"},
		"a caller without a certificate": {none, good, "asks for a certificate, and we show none",
			"shows no certificate"},
		"a called one without any either": {good, none, "", "none"},
	} {
		x, y := meet(t, c.caller, c.called, "")
		if x == nil || y == nil {
			t.Errorf("%s was let in: %v, %v", name, x, y)
			continue
		}
		require.Contains(t, x.Error(), c.byCaller)
		require.Contains(t, y.Error(), c.byCalled)
		if c.byCaller != "" && !errors.Is(x, os.ErrPermission) {
			t.Errorf("%s: %v is not os.ErrPermission", name, x)
		}
	}
}

// wire is a connection over the loopback.
func wire(t *testing.T) (near, far net.Conn) {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	near = must(net.Dial("tcp", l.Addr().String()))(t)
	return near, must(l.Accept())(t)
}

// Old versions of TLS are refused, and so is who speaks something else.
func TestOthersAreNamed(t *testing.T) {
	a, ca := newAuthority(t, "ours")
	good := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "good"}, ca))
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	near, far := wire(t)
	go func() {
		_, _ = far.Write([]byte("SSH-2.0-OpenSSH_9.9\r\n"))
		_, _ = io.Copy(io.Discard, far)
	}()
	_, err := good.Call(ctx, near, "ssh.test")
	_, _ = near.Close(), far.Close()
	if err == nil || !strings.Contains(err.Error(), "does not speak TLS") {
		t.Errorf("another protocol: %v", err)
	}
	near, far = wire(t)
	go func() {
		old := good.source.current().caller.Clone()
		old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		_ = tls.Client(far, old).HandshakeContext(ctx)
	}()
	_, err = good.Answer(ctx, near)
	_, _ = near.Close(), far.Close()
	if err == nil || !strings.Contains(err.Error(), "does not speak TLS 1.3") {
		t.Errorf("TLS 1.2: %v", err)
	}
}

// What is replaced on disk is in use from the next handshake on; what does not fit is not.
func TestFilesAreFollowed(t *testing.T) {
	a, ca := newAuthority(t, "first")
	b, otherCA := newAuthority(t, "second")
	dir := t.TempDir()
	files := member(t, dir, a, testkit.Member{Name: "node"}, ca)
	node := fromFiles(t, files)
	old := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "old"}, ca))
	other := fromFiles(t, member(t, t.TempDir(), b, testkit.Member{Name: "new"}, otherCA))
	if x, y := meet(t, old, node, ""); x != nil || y != nil {
		t.Fatalf("before: %v, %v", x, y)
	}
	pair, _, err := b.Issue(testkit.Member{Name: "node", Valid: time.Hour})
	require.NoError(t, err)
	if err := os.WriteFile(files[0], pair.Cert, 0o600); err != nil { // its key is still the old one
		t.Fatal(err)
	}
	if x, y := meet(t, old, node, ""); x != nil || y != nil {
		t.Errorf("half-way: %v, %v", x, y)
	}
	if node.Facts().RenewError == nil {
		t.Error("a certificate without its key is not reported")
	}
	member(t, dir, b, testkit.Member{Name: "node"}, otherCA)
	if x, y := meet(t, other, node, ""); x != nil || y != nil {
		t.Errorf("after: %v, %v", x, y)
	}
	if f := node.Facts(); f.RenewError != nil || f.Issuer != "second" {
		t.Errorf("after: %+v", f)
	}
	if x, _ := meet(t, old, node, ""); x == nil {
		t.Error("a member of the former authority is still let in")
	}
	require.NoError(t, os.Remove(files[2]))
	if x, y := meet(t, node, other, ""); x != nil || y != nil {
		t.Errorf("with a file gone: %v, %v", x, y)
	}
	require.ErrorIs(t, node.Facts().RenewError, os.ErrNotExist, "a file that is gone")
}

func TestFilesThatDoNotFit(t *testing.T) {
	a, ca := newAuthority(t, "ours")
	_, other := newAuthority(t, "theirs")
	dir := t.TempDir()
	good := member(t, dir, a, testkit.Member{Name: "good"}, ca)
	two := member(t, dir, a, testkit.Member{Name: "two"}, ca)
	late := member(t, dir, a, testkit.Member{Name: "late", From: time.Now().Add(-2 * time.Hour),
		Valid: time.Hour}, ca)
	wrong := filepath.Join(dir, "wrong.pem")
	require.NoError(t, os.WriteFile(wrong, other.Cert, 0o600))
	large := filepath.Join(dir, "large.pem")
	require.NoError(t, os.WriteFile(large, make([]byte, fileMax+1), 0o600))
	for name, c := range map[string]struct {
		files [3]string
		want  string
	}{
		"no file": {[3]string{filepath.Join(dir, "none"), good[1], good[2]},
			"no such file"},
		"another key":    {[3]string{good[0], two[1], good[2]}, "private key does not match"},
		"no certificate": {[3]string{good[1], good[1], good[2]}, "certificate"},
		"no authority": {[3]string{good[0], good[1], good[1]}, "holds no certificate of " +
			"an authority"},
		"another authority": {[3]string{good[0], good[1], wrong}, `which is not among those of`},
		"expired":           {late, "was valid until"},
		"too large":         {[3]string{large, good[1], good[2]}, "at most 1048576 are read"},
	} {
		if _, err := FromFiles(c.files[0], c.files[1], c.files[2]); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q in it", name, err, c.want)
		}
	}
	for name, c := range map[string]*tls.Config{"nil": nil, "empty": {},
		"no roots": {Certificates: make([]tls.Certificate, 1)}} {
		if _, err := FromTLS(c); err == nil {
			t.Errorf("a tls.Config that is %s was taken", name)
		}
	}
}
