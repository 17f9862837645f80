// SPDX-License-Identifier: Apache-2.0

package fakeverbs

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWordsAreThoseOfTheLibrary(t *testing.T) {
	text, err := os.ReadFile("../../../csrc/verbs/testdata/fakeverbs/control.h")
	require.NoError(t, err)
	_, body, _ := strings.Cut(string(text), "struct fake_panel {")
	body, _, _ = strings.Cut(body, "\n};")
	var want []string
	for _, m := range regexp.MustCompile(`_Atomic uint32_t ([\w,\s]+);`).FindAllStringSubmatch(body,
		-1) {
		want = append(want, strings.Fields(strings.ReplaceAll(m[1], ",", " "))...)
	}
	if !slices.Equal(names[:], want) {
		t.Errorf("words %q\nwant %q", names, want)
	}
}

func TestSetIsSetBack(t *testing.T) {
	built := Path() != "" // by another test of this process: the file is gone since
	var opened []string
	load := func(path string) error {
		if _, err := os.Stat(path); err != nil && opened == nil && !built {
			return err
		}
		opened = append(opened, path)
		return nil
	}
	t.Run("first", func(t *testing.T) {
		f := Open(t, 2, load)
		f.Device(1).SetLink(false)
		f.Device(1).FailNext(3, 10)
		if d := f.Device(1); d.Get(Link) != 0 || d.Get(Fail) != 3 || d.Get(FailStatus) != 10 {
			t.Errorf("link %d, fail %d, status %d", d.Get(Link), d.Get(Fail), d.Get(FailStatus))
		}
	})
	f := Open(t, 2, load)
	if d := f.Device(1); d.Get(Link) != 1 || d.Get(Fail) != 0 {
		t.Errorf("link %d, fail %d", d.Get(Link), d.Get(Fail))
	}
	if len(opened) != 2 || opened[0] != Path() || opened[1] != Path() {
		t.Errorf("opened %q, and the path is %s", opened, Path())
	}
	if n := f.InUse(); len(n) != 0 {
		t.Errorf("in use: %v", n)
	}
}
