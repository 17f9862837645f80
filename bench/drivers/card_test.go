// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package drivers

import (
	"bytes"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// entries are scattered at the host, and in one run on the card.
var entries = [2][]int32{{4, 5, 6, 7}, {9, 2, 17, 11}}

// standIn is one of libcuda, of which a process opens one.
var standIn = sync.OnceValues(func() (*standin.Library, error) {
	library, err := standin.BuildCUDA()
	if err == nil {
		atExit = append(atExit, library.Remove)
	}
	return library, err
})

// TestCardEqualsALoopOfCopies: a stand-in of a card, with and without a kernel, leaves on either
// side what memcpy leaves.
func TestCardEqualsALoopOfCopies(t *testing.T) {
	library, err := standIn()
	require.NoError(t, err)
	const size, whole = 656, 32 * 656
	left := hostmem.InUse()["bench"]
	t.Run("ways", func(t *testing.T) {
		want := meet(t, bench.Host, whole, "memcpy")
		for _, options := range []string{"", ",sms=1"} {
			word := "cuda:library=" + library.Path + options
			m := meet(t, bench.GPU, whole, "engine", word)
			content := func(base byte) ([]byte, []byte) {
				near, far := make([]byte, whole), make([]byte, whole)
				for i := range near {
					near[i], far[i] = base+byte(i%251), base+byte(i%241)
				}
				return near, far
			}
			for i, op := range []string{bench.OpRead, bench.OpWrite} {
				near, far := content(byte(i))
				copy(want.Memory(), near)
				copy(want.far(), far)
				copy(m.far(), far)
				card := m.end.(bench.Keeper)
				_, err := card.WriteAt(near, 0)
				require.NoError(t, err)
				want.move(t, op, size, entries[0], entries[1])
				m.move(t, op, size, entries[0], entries[1])
				have := make([]byte, whole)
				_, err = card.ReadAt(have, 0)
				require.NoError(t, err)
				if !bytes.Equal(have, want.Memory()[:whole]) ||
					!bytes.Equal(m.far()[:whole], want.far()[:whole]) {
					t.Errorf("%s, %s: it differs from a loop of copies", word, op)
				}
			}
		}
		m := meet(t, bench.GPU, whole, "copy-engine",
			"cuda:sms=4,library="+library.Path)
		m.move(t, bench.OpRead, size, entries[0], entries[1])
		m.move(t, bench.OpWrite, size, entries[0], entries[1])
	})
	require.Equal(t, left, hostmem.InUse()["bench"])
}

// TestCardAndFile: cuFile and the engine's own chain leave in a file, and on a card, what was sent.
func TestCardAndFile(t *testing.T) {
	library, err := standIn()
	require.NoError(t, err)
	cufile, err := standin.BuildCuFile()
	require.NoError(t, err)
	t.Cleanup(cufile.Remove)
	t.Setenv("STANDIN_LIBCUDA", library.Path)
	t.Setenv("STANDIN_CUFILE_PANEL", cufile.Panel)
	t.Setenv("CUFILE_LOGFILE_PATH", filepath.Join(t.TempDir(), "cufile.log"))
	const size, whole = 4096, 32 * 4096
	words := []string{"cuda:library=" + library.Path, "dir=" + t.TempDir()}
	for only, more := range map[string]string{"staged": "posix",
		"gds": "gds:cuda=" + library.Path + ",library=" + cufile.Path} {
		m := meet(t, bench.GPUFile, whole, "engine", append(words, more, "only="+only)...)
		card := m.end.(bench.Keeper)
		sent := make([]byte, whole)
		for i := range sent {
			sent[i] = byte(i * 7 >> 3)
		}
		_, err := card.WriteAt(sent, 0)
		require.NoError(t, err)
		m.move(t, bench.OpWrite, size, entries[0], entries[1])
		for i := range entries[0] {
			require.Equal(t, slice(sent, entries[0][i], size), slice(m.far(), entries[1][i], size))
		}
		_, err = card.WriteAt(make([]byte, whole), 0)
		require.NoError(t, err)
		m.move(t, bench.OpRead, size, entries[0], entries[1])
		have := make([]byte, whole)
		_, err = card.ReadAt(have, 0)
		require.NoError(t, err)
		for _, slot := range entries[0] {
			require.Equal(t, slice(sent, slot, size), slice(have, slot, size), only)
		}
	}
}
