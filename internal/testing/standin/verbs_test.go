// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"os"
	"testing"
)

func TestVerbsSetIsSetBack(t *testing.T) {
	built := VerbsPath() != "" // by another test of this process: the file is gone since
	var opened []string
	load := func(path string) error {
		if _, err := os.Stat(path); err != nil && opened == nil && !built {
			return err
		}
		opened = append(opened, path)
		return nil
	}
	t.Run("first", func(t *testing.T) {
		f := OpenVerbs(t, 2, load)
		f.Device(1).SetLink(false)
		f.Device(1).FailNext(3, 10)
		if d := f.Device(1); d.Get("link") != 0 || d.Get("fail") != 3 ||
			d.Get("fail_status") != 10 {
			t.Errorf("link %d, fail %d, status %d", d.Get("link"), d.Get("fail"),
				d.Get("fail_status"))
		}
	})
	f := OpenVerbs(t, 2, load)
	if d := f.Device(1); d.Get("link") != 1 || d.Get("fail") != 0 {
		t.Errorf("link %d, fail %d", d.Get("link"), d.Get("fail"))
	}
	if len(opened) != 2 || opened[0] != VerbsPath() || opened[1] != VerbsPath() {
		t.Errorf("opened %q, and the path is %s", opened, VerbsPath())
	}
	if n := f.InUse(); len(n) != 0 {
		t.Errorf("in use: %v", n)
	}
}
