// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestListsOfPartOfIt: a list of what has changed since another, or of some certificates alone,
// says so by an extension that is critical: taken for a whole one, it would make members again of
// those that it does not name.
func TestListsOfPartOfIt(t *testing.T) {
	root := sign(t, "root", 1, true, nil)
	path := filepath.Join(t.TempDir(), "list")
	for _, last := range []int{27, 28} { // delta, issuing distribution point
		text := root.lists(t, &x509.RevocationList{Number: big.NewInt(2),
			ExtraExtensions: []pkix.Extension{{Id: []int{2, 5, 29, last}, Critical: true,
				Value: []byte{2, 1, 1}}}}, time.Now(), 8)
		require.NoError(t, os.WriteFile(path, text, 0o600))
		_, err := readLists([]string{path})
		require.ErrorIs(t, err, driver.ErrNotSupported)
	}
}

// TestBadFilesAreNotReadForEachStranger: neither a list that cannot be read nor a certificate that
// does not fit has each handshake, read or build all anew.
func TestBadFilesAreNotReadForEachStranger(t *testing.T) {
	a, ca := newAuthority(t, "sluice")
	_, otherCA := newAuthority(t, "another")
	dir := t.TempDir()
	path := filepath.Join(dir, "revoked.pem")
	good := must(a.Revoke(nil, nil))(t)
	require.NoError(t, os.WriteFile(path, good, 0o600))
	names := member(t, dir, a, testkit.Member{Name: "keeper"}, ca)
	s := must(FromFiles(names[0], names[1], names[2], path))(t).source.(*files)
	reads, calls := 0, 1000
	s.lists[0].read = func(paths []string) ([]list, error) {
		reads++
		return readLists(paths)
	}
	require.NoError(t, os.WriteFile(path, good[:len(good)-9], 0o600))
	require.NoError(t, os.WriteFile(names[2], otherCA.Cert, 0o600))
	before := s.current()
	for range calls {
		require.Same(t, before, s.current())
	}
	require.Error(t, s.trouble())
	require.Less(t, reads, calls/10)
	require.NoError(t, os.WriteFile(path, good, 0o600))
	require.NoError(t, os.WriteFile(names[2], ca.Cert, 0o600))
	s.current()
	require.NoError(t, s.trouble())
}
