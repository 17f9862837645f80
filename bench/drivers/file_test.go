// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

func openedFile(t *testing.T, n uint64) *fileKeeper {
	t.Helper()
	dir := t.TempDir()
	e := &fileKeeper{folder: dir}
	a, err := e.Open(&bench.Request{Bytes: n})
	require.NoError(t, err)
	t.Cleanup(func() { e.Close() })
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("the file has a name: %v, %v", left, err)
	}
	var card struct {
		Path  string
		Bytes uint64
	}
	text, err := base64.StdEncoding.DecodeString(a.Card)
	if err == nil {
		err = json.Unmarshal(text, &card)
	}
	if info, statErr := os.Stat(card.Path); err != nil || statErr != nil || card.Bytes != n ||
		info.Size() != int64(n) {
		t.Errorf("card %q: %v, %v", text, err, statErr)
	}
	if !strings.HasPrefix(a.Settings, "a file on ") {
		t.Errorf("settings %q", a.Settings)
	}
	return e
}

func TestFileIsReachedByItsCard(t *testing.T) {
	e := openedFile(t, 1<<20)
	if _, err := e.WriteAt([]byte("mark"), 5000); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, errors.Join(e.Cache(false), e.Cache(true)))
	got := make([]byte, 4)
	if _, err := e.ReadAt(got, 5000); err != nil || !bytes.Equal(got, []byte("mark")) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := e.Prepare("write", 1, nil, nil); !errors.Is(err, bench.ErrUnsupported) {
		t.Errorf("a file moves bytes: %v", err)
	}
}

// TestPageCacheIsAsAsked asks the kernel, and reads nothing: a read that waits for nothing brings
// what it misses, and a quick disk has brought it before the kernel looks.
func TestPageCacheIsAsAsked(t *testing.T) {
	const n = 1 << 20
	e := openedFile(t, n)
	unavailable := func(reason, fix string) {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "disk", Reason: reason,
			Fix: fix})
	}
	if strings.Contains(e.system(), "tmpfs") {
		unavailable("tmpfs is page cache and nothing else", "set TMPDIR to a folder on a disk")
	}
	cached := func() uint64 {
		var s unix.Cachestat_t
		err := unix.Cachestat(uint(e.Fd()), &unix.CachestatRange{Len: n}, &s, 0)
		if errors.Is(err, unix.ENOSYS) {
			unavailable("the kernel has no cachestat", "Linux 6.5 or later")
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			unavailable(e.system()+" cannot say what is in the page cache",
				"set TMPDIR to a folder on a disk")
		}
		require.NoError(t, err)
		return s.Cache * uint64(os.Getpagesize())
	}
	require.NoError(t, e.Cache(true))
	if got := cached(); got != n {
		t.Errorf("%d of %d bytes are in the page cache after all was asked for", got, n)
	}
	require.NoError(t, e.Cache(false))
	if got := cached(); got != 0 {
		t.Errorf("%d of %d bytes are in the page cache after all was dropped", got, n)
	}
}
