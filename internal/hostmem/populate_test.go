// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mapping is fresh memory of some kind.
func mapping(t testing.TB, n, prot, flags, fd int) []byte {
	t.Helper()
	mem, err := unix.Mmap(fd, 0, n, prot, flags)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	return mem
}

func file(t testing.TB, content []byte) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(name, content, 0o600))
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// mapped returns the KiB of a file's mapping that need no fault any more.
func mapped(t testing.TB, mem []byte) (kib int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(text), fmt.Sprintf("\n%x-", address(mem)))
	_, after, resident := strings.Cut(after, "\nRss:")
	if _, err := fmt.Sscan(after, &kib); err != nil || !found || !resident {
		t.Fatalf("no mapping at %#x, %v", address(mem), err)
	}
	return kib
}

const (
	faultBytes = faultStep + 5*4096
	readWrite  = unix.PROT_READ | unix.PROT_WRITE
)

// TestFaultIn finds all pages of memory that begins and ends within one, of which some were
// written to, and changes no byte.
func TestFaultIn(t *testing.T) {
	for _, threads := range []int{-1, 1, 2, 8, 100} {
		t.Run(fmt.Sprint(threads), func(t *testing.T) {
			mem := mapping(t, faultBytes, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
			want := make([]byte, faultBytes)
			for i := 0; i < faultBytes; i += 1<<20 + 7777 {
				mem[i], want[i] = byte(i), byte(i)
			}
			part := mem[100 : faultBytes-100]
			FaultIn(part, true, threads)
			whole := mem[basePage : faultBytes-basePage]
			require.EqualValues(t, len(whole)/int(basePage), resident(t, whole),
				"of pages are there")
			require.True(t, bytes.Equal(mem, want), "the contents are other ones")
		})
	}
	for _, n := range []int{0, 1, 4095, 8191} {
		FaultIn(make([]byte, n), true, 4)
	}
}

// TestFaultInOfFiles has memory that is a file's: shared with it, apart from it, not to be
// written to.
func TestFaultInOfFiles(t *testing.T) {
	content := make([]byte, faultBytes)
	for i := 0; i < faultBytes; i += 1000 {
		content[i] = byte(i >> 3)
	}
	for name, c := range map[string]struct {
		prot, flags int
		write       bool
		kib         int
	}{
		"shared":              {readWrite, unix.MAP_SHARED, true, faultBytes >> 10},
		"private":             {readWrite, unix.MAP_PRIVATE, true, faultBytes >> 10},
		"shared, read-only":   {unix.PROT_READ, unix.MAP_SHARED, false, faultBytes >> 10},
		"private, read-only":  {unix.PROT_READ, unix.MAP_PRIVATE, false, faultBytes >> 10},
		"read-only after all": {unix.PROT_READ, unix.MAP_SHARED, true, 0},
	} {
		f := file(t, content)
		mem := mapping(t, faultBytes, c.prot, c.flags, int(f.Fd()))
		FaultIn(mem, c.write, 4)
		require.EqualValues(t, c.kib, mapped(t, mem), "%s: KiB are mapped", name)
		after, err := os.ReadFile(f.Name())
		if err != nil || !bytes.Equal(mem, content) || !bytes.Equal(after, content) {
			t.Errorf("%s: the contents are other ones, %v", name, err)
		}
	}
}

// TestFaultInOfAHole leaves to others what is not there.
func TestFaultInOfAHole(t *testing.T) {
	mem := mapping(t, faultBytes, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	require.NoError(t, unix.Mprotect(mem[1<<20:2<<20], unix.PROT_NONE))
	mem[0] = 7
	FaultIn(mem, true, 2)
	if mem[0] != 7 || mem[faultBytes-1] != 0 {
		t.Error("the contents are other ones")
	}
}
