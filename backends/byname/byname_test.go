// SPDX-License-Identifier: Apache-2.0

package byname

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
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
