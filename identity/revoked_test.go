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

	"github.com/sluicehq/sluice/internal/authority"
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
	files := member(t, dir, a, authority.Member{Name: "keeper"}, ca, otherCA)
	keeper := must(FromFiles(files[0], files[1], files[2], list))(t)
	bad := member(t, dir, a, authority.Member{Name: "bad"}, ca, otherCA)
	cousin := fromFiles(t, member(t, dir, b, authority.Member{Name: "cousin"}, ca, otherCA))
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

	serial := must(authority.Serial(bad[0]))(t)
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
		require.ErrorContains(t, keeper.Facts().RenewError, "and that in use has 2")
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

// TestRevokedBetween: what an authority of ours has revoked is found where the peer does not send
// it, unless another chain leads round it.
func TestRevokedBetween(t *testing.T) {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	made := func(name string, serial int64, by *x509.Certificate) *x509.Certificate {
		c := &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true,
			SerialNumber: big.NewInt(serial), BasicConstraintsValid: true,
			KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}
		if by == nil {
			by = c
		}
		raw := must(x509.CreateCertificate(rand.Reader, c, by, key.Public(), key))(t)
		return must(x509.ParseCertificate(raw))(t)
	}
	root, other := made("root", 1, nil), made("other", 2, nil)
	between := made("between", 3, root)
	leaf := made("leaf", 4, between)
	list := must(x509.CreateRevocationList(rand.Reader, &x509.RevocationList{
		Number: big.NewInt(1), RevokedCertificateEntries: []x509.RevocationListEntry{
			{SerialNumber: between.SerialNumber, RevocationTime: time.Now()}},
	}, root, key))(t)
	r := newRevoked()
	text := pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: list})
	require.NoError(t, r.add("list", text, []*x509.Certificate{root, between, other}))

	s := tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf},
		VerifiedChains: [][]*x509.Certificate{{leaf, between}, {leaf, between, root}}}
	require.ErrorContains(t, r.verify(s), `"between", serial number 3, is revoked`)
	s.VerifiedChains = append(s.VerifiedChains, []*x509.Certificate{leaf, other})
	require.NoError(t, r.verify(s))
	s.PeerCertificates = append(s.PeerCertificates, between)
	require.Error(t, r.verify(s), "a peer that sends it shows that it relies on it")
}

// TestAuthoritiesOfOneName: an error tells them apart.
func TestAuthoritiesOfOneName(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	b, otherCA := newAuthority(t, "sluice")
	ours := fromFiles(t, member(t, t.TempDir(), a, authority.Member{Name: "one"}, ca))
	theirs := fromFiles(t, member(t, t.TempDir(), b, authority.Member{Name: "two"}, otherCA, ca))
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
	files := member(t, dir, a, authority.Member{Name: "keeper"}, ca, otherCA)
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
