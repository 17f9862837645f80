// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// keysOf reads a key file of secrets that are one byte each, 32 times.
func keysOf(tb testing.TB, secrets ...byte) *Keys {
	tb.Helper()
	text := "# a comment\n\n"
	for _, b := range secrets {
		text += strings.Repeat(fmt.Sprintf("%02x", b), keyBytes) + "\n"
	}
	k, err := ReadKeys(write(tb, text, 0o600))
	require.NoError(tb, err)
	return k
}

func write(tb testing.TB, text string, mode os.FileMode) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "keys")
	require.NoError(tb, os.WriteFile(path, []byte(text), 0o600))
	require.NoError(tb, os.Chmod(path, mode))
	return path
}

// TestVectors: the ciphertexts are those of https://c2sp.org/XAES-256-GCM, whose test vectors these
// are.
func TestVectors(t *testing.T) {
	for secret, v := range map[byte]struct{ about, want string }{
		1: {"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		3: {"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		k := newKey(bytes.Repeat([]byte{secret}, keyBytes))
		got := k.derive([]byte("ABCDEFGHIJKL")).Seal(nil, []byte("MNOPQRSTUVWX"),
			[]byte("XAES-256-GCM"), []byte(v.about))
		require.Equal(t, v.want, hex.EncodeToString(got))
	}
}

// TestSeal: a block opens by each file that has its key, in place, too, and by nothing else.
func TestSeal(t *testing.T) {
	plain, about := bytes.Repeat([]byte("block"), 100), []byte("name, place")
	old, both, other := keysOf(t, 1), keysOf(t, 2, 1), keysOf(t, 3)
	sealed := old.Seal(nil, plain, about)
	require.Len(t, sealed, len(plain)+Overhead)
	require.NotContains(t, string(sealed), "block")
	for _, k := range []*Keys{old, both, keysOf(t, 1)} {
		got, err := k.Open([]byte("x"), sealed, about)
		require.NoError(t, err)
		require.Equal(t, append([]byte("x"), plain...), got)
	}
	anew := both.Seal(nil, plain, about)
	_, err := old.Open(nil, anew, about)
	require.ErrorIs(t, err, driver.ErrCorrupt)
	require.ErrorContains(t, err, "not in")
	_, err = other.Open(nil, sealed, about)
	require.ErrorIs(t, err, driver.ErrCorrupt)

	buf := append(bytes.Clone(plain), make([]byte, Overhead)...)
	buf = old.Seal(buf[:0], buf[:len(plain)], about)
	require.NotEqual(t, sealed, buf, "a nonce came twice")
	got, err := old.Open(buf[:0], buf, about)
	require.NoError(t, err)
	require.Equal(t, plain, got)

	for at := range sealed { // each byte counts, also of the nonce and of the id
		wrong := bytes.Clone(sealed)
		wrong[at] ^= 1
		_, err := old.Open(nil, wrong, about)
		require.ErrorIs(t, err, driver.ErrCorrupt, at)
	}
	for _, wrong := range [][]byte{nil, sealed[:Overhead-1], sealed[1:], sealed[:len(sealed)-1]} {
		_, err := old.Open(nil, wrong, about)
		require.ErrorIs(t, err, driver.ErrCorrupt)
	}
	_, err = old.Open(nil, sealed, append(about, 0))
	require.ErrorIs(t, err, driver.ErrCorrupt)

	for range 2*derivedMax + 1 { // of as many processes
		_, err := both.Open(nil, keysOfHalf(old).Seal(nil, plain, about), about)
		require.NoError(t, err)
	}
	require.LessOrEqual(t, len(both.derived), derivedMax)
}

// keysOfHalf is what another process has of a key file.
func keysOfHalf(k *Keys) *Keys {
	o := &Keys{keys: k.keys}
	copy(o.half[:], fmt.Sprintf("%12d", k.sealed.Add(1)))
	o.sealer = o.keys[0].derive(o.half[:])
	return o
}

// TestAllocates: once a cipher is known nothing is allocated.
func TestAllocates(t *testing.T) {
	k, about := keysOf(t, 1), []byte("about")
	buf := make([]byte, 4096+Overhead)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		sealed := k.Seal(buf[:0], buf[:4096], about)
		if _, err := k.Open(buf[:0], sealed, about); err != nil {
			t.Error(err)
		}
	}))
}

// TestReadKeys: what is no key file.
func TestReadKeys(t *testing.T) {
	good := strings.Repeat("0a", keyBytes) + "\n"
	many := ""
	for n := range keysMax + 1 {
		many += fmt.Sprintf("%064x\n", n)
	}
	for name, c := range map[string]struct {
		text, want string
		mode       os.FileMode
		is         error
	}{
		"empty":          {"", "no file", 0o600, driver.ErrBounds},
		"no key":         {"# nothing\n", "0 keys", 0o600, driver.ErrBounds},
		"no hex":         {good + "secret\n", "line 2", 0o600, driver.ErrBounds},
		"short":          {good[2:], "line 1", 0o600, driver.ErrBounds},
		"twice":          {good + good, "twice", 0o600, driver.ErrBounds},
		"many":           {many, "17 keys", 0o600, driver.ErrBounds},
		"long":           {strings.Repeat("#\n", fileMax), "no file", 0o600, driver.ErrBounds},
		"open to all":    {good, "chmod 600", 0o644, os.ErrPermission},
		"group's, too":   {good, "chmod 600", 0o660, os.ErrPermission},
		"group may read": {good, "", 0o640, nil},
	} {
		_, err := ReadKeys(write(t, c.text, c.mode))
		require.ErrorIs(t, err, c.is, name)
		if c.is != nil {
			require.ErrorContains(t, err, c.want, name)
			require.NotContains(t, err.Error(), "secret", name)
		}
	}
	pipe := filepath.Join(t.TempDir(), "pipe") // nobody writes to it
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	_, err := ReadKeys(pipe)
	require.ErrorIs(t, err, driver.ErrBounds)
	_, err = ReadKeys("/dev/zero")
	require.ErrorIs(t, err, driver.ErrBounds)
	_, err = ReadKeys(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func BenchmarkSeal(b *testing.B) {
	k, about := keysOf(b, 1), make([]byte, 52)
	for _, size := range []int{64 << 10, 1 << 20} {
		plain, sealed := make([]byte, size), make([]byte, 0, size+Overhead)
		b.Run(fmt.Sprintf("seal/%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				sealed = k.Seal(sealed[:0], plain, about)
			}
		})
		b.Run(fmt.Sprintf("open/%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				if _, err := k.Open(plain[:0], sealed, about); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
