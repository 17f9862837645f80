// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestRevoked: a list that changes is followed, on both sides of a connection, and concerns the
// numbers of its own authority alone.
func TestRevoked(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	b, otherCA := newAuthority(t, "sluice")
	dir := t.TempDir()
	list := filepath.Join(dir, "revoked.pem")
	write := func(text []byte, err error) {
		t.Helper()
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(list+".new", text, 0o600))
		require.NoError(t, os.Rename(list+".new", list))
	}
	write(a.Revoke(nil, nil))
	files := member(t, dir, a, testkit.Member{Name: "keeper"}, ca, otherCA)
	keeper := must(FromFiles(files[0], files[1], files[2], list))(t)
	bad := member(t, dir, a, testkit.Member{Name: "bad"}, ca, otherCA)
	cousin := fromFiles(t, member(t, dir, b, testkit.Member{Name: "cousin"}, ca, otherCA))
	outcast := fromFiles(t, bad)
	meets := func(id *Identity) {
		t.Helper()
		for _, pair := range [][2]*Identity{{id, keeper}, {keeper, id}} {
			x, y := meet(t, pair[0], pair[1], "")
			require.NoError(t, errors.Join(x, y))
		}
	}
	meets(outcast)
	meets(cousin)

	serial := must(testkit.CertificateSerial(bad[0]))(t)
	text, err := a.Revoke(must(os.ReadFile(list))(t), serial)
	write(text, err)
	x, y := meet(t, outcast, keeper, "")
	require.ErrorContains(t, x, "not revoked")
	require.ErrorContains(t, y, "certificate of \"bad\", serial number "+serial.Text(16)+
		", is revoked")
	require.ErrorIs(t, y, os.ErrPermission)
	x, _ = meet(t, keeper, outcast, "")
	require.ErrorContains(t, x, "is revoked")
	meets(cousin)

	latest := must(os.ReadFile(list))(t)
	for _, older := range [][]byte{must(a.Revoke(nil, nil))(t), must(b.Revoke(nil, nil))(t)} {
		write(older, nil)
		_, y = meet(t, outcast, keeper, "")
		require.ErrorContains(t, y, "is revoked")
		require.ErrorContains(t, keeper.Facts().RenewError, "has number 2")
	}

	stranger, _ := newAuthority(t, "sluice")
	text, err = stranger.Revoke(nil, big.NewInt(7))
	write(append(latest, text...), err)
	for range 2 { // passed over, and told for as long as it is there
		_, y = meet(t, outcast, keeper, "")
		require.ErrorContains(t, y, "is revoked")
		require.ErrorContains(t, keeper.Facts().RenewError, "none of our authorities")
	}

	text, err = b.Revoke(nil, serial) // the same number, of the other authority
	write(append(must(a.Revoke(nil, nil))(t), text...), err)
	keeper = must(FromFiles(files[0], files[1], files[2], list))(t)
	meets(outcast)

	text, err = stranger.Revoke(nil, big.NewInt(7))
	write(text, err)
	_, err = FromFiles(files[0], files[1], files[2], list)
	require.ErrorContains(t, err, "none of our authorities")
	_, err = FromFiles(files[0], files[1], files[2], files[0])
	require.Error(t, err, "a certificate is no list")
}

// signed is a certificate with its key.
type signed struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

// sign makes a certificate by an authority; nil: it signs itself.
func sign(t testing.TB, name string, serial int64, isCA bool, by *signed) *signed {
	t.Helper()
	s := &signed{&x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: isCA,
		SerialNumber: big.NewInt(serial), BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}, must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)}
	if !isCA {
		s.KeyUsage = x509.KeyUsageDigitalSignature
		s.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	if by == nil {
		by = s
	}
	raw := must(x509.CreateCertificate(rand.Reader, s.Certificate, by.Certificate, s.key.Public(),
		by.key))(t)
	s.Certificate = must(x509.ParseCertificate(raw))(t)
	return s
}

// revokes makes a list; a number of 0 is none, as openssl makes lists without its file crlnumber.
func (s *signed) revokes(t testing.TB, number int64, at time.Time, serials ...int64) []byte {
	t.Helper()
	return s.lists(t, &x509.RevocationList{Number: big.NewInt(number)}, at, serials...)
}

// lists is revokes with what a list has besides.
func (s *signed) lists(t testing.TB, l *x509.RevocationList, at time.Time,
	serials ...int64) []byte {
	t.Helper()
	l.ThisUpdate, l.NextUpdate = at, at.Add(time.Hour)
	for _, n := range serials {
		l.RevokedCertificateEntries = append(l.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: big.NewInt(n), RevocationTime: at})
	}
	raw := must(x509.CreateRevocationList(rand.Reader, l, s.Certificate, s.key))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: raw})
}

// TestRevokedBetween: what an authority of ours has revoked is found where the peer does not send
// it, unless another chain leads round it.
func TestRevokedBetween(t *testing.T) {
	root, other := sign(t, "root", 1, true, nil), sign(t, "other", 2, true, nil)
	between := sign(t, "between", 3, true, root)
	leaf := sign(t, "leaf", 4, false, between)
	file := filepath.Join(t.TempDir(), "list")
	require.NoError(t, os.WriteFile(file, root.revokes(t, 1, time.Now(), 3), 0o600))
	r := must(newRevoked(nil, must(readLists([]string{file}))(t),
		[]*x509.Certificate{root.Certificate, between.Certificate, other.Certificate}))(t)

	chain := func(list ...*signed) (certs []*x509.Certificate) {
		for _, s := range list {
			certs = append(certs, s.Certificate)
		}
		return certs
	}
	s := tls.ConnectionState{PeerCertificates: chain(leaf),
		VerifiedChains: [][]*x509.Certificate{chain(leaf, between), chain(leaf, between, root)}}
	require.ErrorContains(t, r.verify(s), `"between", serial number 3, is revoked`)
	s.VerifiedChains = append(s.VerifiedChains, chain(leaf, other))
	require.NoError(t, r.verify(s))
	s.PeerCertificates = append(s.PeerCertificates, between.Certificate)
	require.Error(t, r.verify(s), "a peer that sends it shows that it relies on it")
}

// TestRevokedBetweenOnBothSides: members of an authority that is revoked are refused by the side
// that dials as by the side that is called, and so are those whom functions of a tls.Config
// refuse for their chain.
func TestRevokedBetweenOnBothSides(t *testing.T) {
	root := sign(t, "root", 1, true, nil)
	between := sign(t, "between", 3, true, root)
	bad, good := sign(t, "bad", 4, false, between), sign(t, "good", 5, false, root)
	dir := t.TempDir()
	file := func(name string, text ...[]byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, bytes.Join(text, nil), 0o600))
		return path
	}
	cert := func(s *signed) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Raw})
	}
	key := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY",
		Bytes: must(x509.MarshalPKCS8PrivateKey(good.key))(t)})
	keeper := must(FromFiles(file("good.pem", cert(good)), file("good-key.pem", key),
		file("ca.pem", cert(root), cert(between)),
		file("revoked.pem", root.revokes(t, 1, time.Now(), 3))))(t)

	roots := pool([]*x509.Certificate{root.Certificate, between.Certificate})
	base := tls.Config{RootCAs: roots, ClientCAs: roots}
	of := func(s *signed, check func([][]byte, [][]*x509.Certificate) error) *Identity {
		c := base.Clone()
		c.Certificates = []tls.Certificate{{Certificate: [][]byte{s.Raw}, PrivateKey: s.key}}
		c.VerifyPeerCertificate = check
		return must(FromTLS(c))(t)
	}
	checks := of(good, func(raw [][]byte, chains [][]*x509.Certificate) error {
		require.Len(t, raw, 1)
		for _, chain := range chains {
			if chain[1].SerialNumber.Int64() == 3 {
				return errors.New("it is revoked")
			}
		}
		return nil
	})
	outcast := of(bad, nil)
	for _, id := range []*Identity{keeper, checks} {
		_, called := meet(t, outcast, id, "")
		require.ErrorContains(t, called, "is revoked")
		caller, _ := meet(t, id, outcast, "")
		require.ErrorContains(t, caller, "is revoked")
		x, y := meet(t, id, of(good, nil), "")
		require.NoError(t, errors.Join(x, y))
	}
}

// TestListsFollow: a list gives way to a later one, or to the same.
func TestListsFollow(t *testing.T) {
	root := sign(t, "root", 1, true, nil)
	dir, now := t.TempDir(), time.Now()
	file := func(number int64, at time.Time, serials ...int64) []list {
		path := filepath.Join(dir, "list")
		text := root.revokes(t, number, at, serials...)
		require.NoError(t, os.WriteFile(path, text, 0o600))
		l := must(readLists([]string{path}))(t)
		if number == 0 {
			l[0].Number = nil
		}
		return l
	}
	one, more, two := file(1, now, 7), file(1, now, 7, 8), file(2, now)
	unnumbered, later := file(0, now, 7), file(0, now.Add(time.Hour), 8)
	for name, c := range map[string]struct {
		before, lists []list
		want          bool
	}{
		"the first":                {nil, one, true},
		"gone":                     {one, nil, false},
		"none":                     {nil, nil, true},
		"the same":                 {one, one, true},
		"higher":                   {one, two, true},
		"lower":                    {two, one, false},
		"another of this number":   {one, more, false},
		"beside another":           {one, append(one, more...), true},
		"one of two":               {append(one, more...), one, false},
		"lower beside":             {two, append(one, two...), true},
		"numbered from now on":     {later, one, true},
		"numbered no more":         {one, later, false},
		"unnumbered, later":        {unnumbered, later, true},
		"unnumbered, earlier":      {later, unnumbered, false},
		"unnumbered, another":      {unnumbered, file(0, now, 9), false},
		"unnumbered, the same one": {unnumbered, unnumbered, true},
	} {
		require.Equal(t, c.want, mayReplace(c.lists, c.before), name)
	}
}

// TestListOfOneNumber: a list gives no way to another one of its number. Two calls at once, or a
// copy that was restored, make such.
func TestListOfOneNumber(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	dir := t.TempDir()
	list := filepath.Join(dir, "revoked.pem")
	write := func(text []byte, err error) {
		t.Helper()
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(list+".new", text, 0o600))
		require.NoError(t, os.Rename(list+".new", list))
	}
	files := member(t, dir, a, testkit.Member{Name: "keeper"}, ca)
	bad := member(t, dir, a, testkit.Member{Name: "bad"}, ca)
	outcast := fromFiles(t, bad)
	write(a.Revoke(nil, must(testkit.CertificateSerial(bad[0]))(t)))
	keeper := must(FromFiles(files[0], files[1], files[2], list))(t)
	write(a.Revoke(nil, big.NewInt(999)))
	for range 2 {
		_, y := meet(t, outcast, keeper, "")
		require.ErrorContains(t, y, "is revoked")
		require.ErrorContains(t, keeper.Facts().RenewError, "give one of a higher number")
	}
}

// TestEachFileIsTaken: a list is in use from the next handshake on, whatever is wrong with the
// other files, and so are the authorities.
func TestEachFileIsTaken(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	b, otherCA := newAuthority(t, "another")
	for name, damage := range map[string]func(files [3]string, other string) error{
		"no key":      func(f [3]string, _ string) error { return os.Remove(f[1]) },
		"a bad key":   func(f [3]string, _ string) error { return os.WriteFile(f[1], nil, 0o600) },
		"another key": func(f [3]string, other string) error { return os.Rename(other, f[1]) },
		"no authority": func(f [3]string, _ string) error {
			return os.WriteFile(f[2], []byte("none"), 0o600)
		},
		"another authority": func(f [3]string, _ string) error {
			return os.WriteFile(f[2], otherCA.Cert, 0o600)
		},
		"a bad list": func(f [3]string, _ string) error {
			return os.WriteFile(filepath.Join(filepath.Dir(f[0]), "first"), nil, 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := member(t, dir, a, testkit.Member{Name: "keeper"}, ca, otherCA)
			bad := member(t, dir, a, testkit.Member{Name: "bad"}, ca)
			cousin := fromFiles(t, member(t, dir, b, testkit.Member{Name: "cousin"}, otherCA, ca))
			first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
			require.NoError(t, os.WriteFile(first, must(b.Revoke(nil, nil))(t), 0o600))
			latest := must(a.Revoke(nil, nil))(t)
			require.NoError(t, os.WriteFile(second, latest, 0o600))
			keeper := must(FromFiles(files[0], files[1], files[2], first, second))(t)
			outcast := fromFiles(t, bad)
			x, y := meet(t, outcast, keeper, "")
			require.NoError(t, errors.Join(x, y))

			require.NoError(t, damage(files, bad[1]))
			latest = must(a.Revoke(latest, must(testkit.CertificateSerial(bad[0]))(t)))(t)
			require.NoError(t, os.WriteFile(second, latest, 0o600))
			_, y = meet(t, outcast, keeper, "")
			require.ErrorContains(t, y, "is revoked")
			require.Error(t, keeper.Facts().RenewError)
			x, y = meet(t, cousin, keeper, "")
			require.NoError(t, errors.Join(x, y))
			require.NoError(t, os.WriteFile(files[2], ca.Cert, 0o600))
			_, y = meet(t, cousin, keeper, "")
			require.ErrorContains(t, y, "signed by another authority")
		})
	}
}

// TestAuthoritiesOfOneName: an error tells them apart.
func TestAuthoritiesOfOneName(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	b, otherCA := newAuthority(t, "sluice")
	ours := fromFiles(t, member(t, t.TempDir(), a, testkit.Member{Name: "one"}, ca))
	theirs := fromFiles(t, member(t, t.TempDir(), b, testkit.Member{Name: "two"}, otherCA, ca))
	_, err := meet(t, theirs, ours, "")
	require.ErrorContains(t, err, `signed by another authority: "sluice" (key `+
		KeyName(b.Cert().SubjectKeyId)+
		`), ours is "sluice" (key `+KeyName(a.Cert().SubjectKeyId)+`)`)
	require.NotEqual(t, KeyName(a.Cert().SubjectKeyId), KeyName(b.Cert().SubjectKeyId))
}

// TestRevokedListsAreReadWhole: a list of several that is cut or damaged is no list less.
func TestRevokedListsAreReadWhole(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	b, otherCA := newAuthority(t, "another")
	dir := t.TempDir()
	files := member(t, dir, a, testkit.Member{Name: "keeper"}, ca, otherCA)
	both := append(must(a.Revoke(nil, nil))(t), must(b.Revoke(nil, nil))(t)...)
	list := filepath.Join(dir, "revoked.pem")
	for name, text := range map[string][]byte{
		"cut": both[:len(both)-40],
		"damaged": bytes.Replace(both, []byte("-----BEGIN X509 CRL-----\n"),
			[]byte("-----BEGIN X509 CRL-----\n?"), 1),
	} {
		require.NoError(t, os.WriteFile(list, text, 0o600))
		_, err := FromFiles(files[0], files[1], files[2], list)
		require.ErrorContains(t, err, "holds 2 lists of revoked certificates, of which 1 "+
			"can be read",
			name)
	}
	require.NoError(t, os.WriteFile(list, both, 0o600))
	_, err := FromFiles(files[0], files[1], files[2], list)
	require.NoError(t, err)
}
