// SPDX-License-Identifier: Apache-2.0

package authority

import (
	"bytes"
	"crypto/x509"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

func TestIssue(t *testing.T) {
	a, pair, err := New("ours", time.Hour)
	require.NoError(t, err)
	if a, err = Parse(pair); err != nil { // as the next command reads it
		t.Fatal(err)
	}
	_, leaf, err := a.Issue(Member{Name: "node", Hosts: []string{"node.test", "10.0.0.2",
		"fd00::2"}, Valid: 24 * time.Hour})
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(a.Cert())
	for _, host := range []string{"node.test", "10.0.0.2", "fd00::2"} {
		for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth,
			x509.ExtKeyUsageClientAuth} {
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host,
				KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
				t.Errorf("%s: %v", host, err)
			}
		}
	}
	if leaf.NotAfter.After(a.Cert().NotAfter) {
		t.Errorf("valid until %v, and the authority until %v", leaf.NotAfter, a.Cert().NotAfter)
	}
	if leaf.IsCA || leaf.KeyUsage&x509.KeyUsageCertSign != 0 {
		t.Error("a member signs members")
	}
	other, _, err := New("ours", time.Hour)
	require.NoError(t, err)
	if err := leaf.CheckSignatureFrom(other.Cert()); err == nil {
		t.Error("signed by another authority of the same name")
	}
}

func TestBadNames(t *testing.T) {
	a, pair, err := New("ours", time.Hour)
	require.NoError(t, err)
	for _, m := range []Member{{}, {Name: string(make([]byte, 65))},
		{Name: "x", Hosts: []string{""}}, {Name: "x", Hosts: []string{"a b"}},
		{Name: "x", Hosts: []string{"ü"}}} {
		m.Valid = time.Hour
		if _, _, err := a.Issue(m); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v", m, err)
		}
	}
	for _, name := range []string{"", ".", "..", "a/b", "../x", "ca", "ca-key", ".hidden", "a b",
		"ü"} {
		if CheckName(name) == nil {
			t.Errorf("%q is taken for a name", name)
		}
	}
	leaf, _, err := a.Issue(Member{Name: "node", Valid: time.Hour})
	require.NoError(t, err)
	for name, p := range map[string]Pair{
		"a member": leaf, "nothing": {}, "another key": {pair.Cert, leaf.Key},
		"noise": {pair.Cert,
			[]byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")},
	} {
		if _, err := Parse(p); err == nil {
			t.Errorf("%s was taken for an authority", name)
		}
	}
}

// TestFilesOutlastALossOfPower: the entry of a file is synced once it has its name.
func TestFilesOutlastALossOfPower(t *testing.T) {
	dir := t.TempDir()
	a, _, err := New("ours", time.Hour)
	require.NoError(t, err)
	synced := 0
	syncEntry = func(f *os.File) error {
		require.Equal(t, dir, filepath.Dir(f.Name()))
		require.FileExists(t, filepath.Join(dir, RevokedFile))
		synced++
		return ownfiles.SyncEntry(f)
	}
	defer func() { syncEntry = ownfiles.SyncEntry }()
	_, err = a.RevokeIn(dir, big.NewInt(7))
	require.NoError(t, err)
	require.Equal(t, 1, synced)
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, list, 1)
}

func TestStore(t *testing.T) {
	dir := t.TempDir()
	_, pair, err := New("ours", time.Hour)
	require.NoError(t, err)
	cert, key := filepath.Join(dir, CertFile), filepath.Join(dir, KeyFile)
	require.NoError(t, Store(pair, cert, key, false))
	_, other, err := New("other", time.Hour)
	require.NoError(t, err)
	if err := Store(other, cert, key, false); !errors.Is(err, os.ErrExist) {
		t.Errorf("over files that are there: %v", err)
	}
	if text, err := os.ReadFile(key); err != nil || !bytes.Equal(text, pair.Key) {
		t.Errorf("the key was replaced (%v)", err)
	}
	if err := Store(other, cert, key, true); err != nil {
		t.Error(err)
	}
	for path, mode := range map[string]os.FileMode{key: 0o600, cert: 0o644} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: mode %v, want %v (%v)", path, info.Mode(), mode, err)
		}
	}
	if a, err := Load(dir); err != nil || a.Cert().Subject.CommonName != "other" {
		t.Errorf("load: %v", err)
	}
	if list, _ := os.ReadDir(dir); len(list) != 2 {
		t.Errorf("left behind: %v", list)
	}
}
