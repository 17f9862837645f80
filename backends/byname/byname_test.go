// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestOpen opens each backend, with an option that all have or none; one that is not here says why.
func TestOpen(t *testing.T) {
	for _, known := range All() {
		b, err := Open(known.Name, map[string][]string{
			"tcp": {"listen=127.0.0.1:0", "plaintext=true", "conns=2"}, "posix": {"path=threads"},
			"mem": {"workers=2", "inline_max=4KiB"}, "cuda": {"sms=2", "library=/nowhere"},
		}[known.Name])
		if err != nil {
			require.ErrorAs(t, err, new(*driver.UnavailableError), known.Name)
			require.True(t, known.Cgo, "%s: %v", known.Name, err)
			continue
		}
		require.Equal(t, known.Name, b.Caps().Name)
		require.Equal(t, known.Reach, b.Caps().Reach, known.Name)
		require.NoError(t, b.Close())
	}
}

func TestWrongWords(t *testing.T) {
	for want, line := range map[string][]string{
		`backend "smoke" does not exist: there are cuda, gds, mem, `: {"smoke"},
		`option "speed" does not exist: there are workers, in`:       {"mem", "speed=9"},
		"option path=tape: there are ring and threads":               {"posix", "path=tape"},
		"want one of them": {"tcp", "plaintext=true",
			"certificate=x"},
		"go together": {"tcp", "certificate=x"},
	} {
		_, err := Open(line[0], line[1:])
		require.ErrorAs(t, err, new(*Error), line)
		require.ErrorContains(t, err, want)
	}
	gone := filepath.Join(t.TempDir(), "gone")
	_, err := Open("tcp", []string{"certificate=" + gone, "key=" + gone, "authority=" + gone})
	require.ErrorContains(t, err, gone)
	require.Equal(t, "ring_bytes", Fields()["RingBytes"])
	require.NoError(t, Check("rdma:devices=rxe0,rxe2,entries=1"))
	for _, spec := range []string{"shm:speed=9", "shm:", "tcp:conns=many", "smoke"} {
		require.ErrorAs(t, Check(spec), new(*Error), spec)
	}
}

// TestServerName: an owner's certificate must be for it, and a new one is in use once its files are
// there.
func TestServerName(t *testing.T) {
	a, ca, err := testkit.NewAuthority("ours", time.Hour)
	require.NoError(t, err)
	dir := t.TempDir()
	authority, _, err := ca.Store(dir, "ca")
	require.NoError(t, err)
	var words []string
	member := func(host string) {
		pair, _, err := a.Issue(testkit.Member{Name: "node", Hosts: []string{host},
			Valid: time.Hour})
		require.NoError(t, err)
		certificate, key, err := pair.Store(dir, "node")
		require.NoError(t, err)
		words = []string{"certificate=" + certificate, "key=" + key, "authority=" + authority,
			"listen=127.0.0.1:0"}
	}
	member("other.test")
	owner, err := Open("tcp", words)
	require.NoError(t, err)
	defer owner.Close()
	dialler, err := Open("tcp", append(words, "server_name=owner.test"))
	require.NoError(t, err)
	defer dialler.Close()
	_, err = dialler.Connect(t.Context(), owner.Addr())
	require.ErrorContains(t, err, `not for "owner.test"`)
	member("owner.test")
	require.Eventually(t, func() bool {
		_, err = dialler.Connect(t.Context(), owner.Addr())
		return err == nil
	}, time.Minute, 10*time.Millisecond, "%v", err)
}
