// SPDX-License-Identifier: Apache-2.0

package fakecufile

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestWordsAreThoseOfTheLibrary(t *testing.T) {
	text, err := os.ReadFile("testdata/standin_panel.h")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(text), "struct panel {")
	body, _, _ = strings.Cut(body, "\n};")
	var want []string
	for _, m := range regexp.MustCompile(`_Atomic unsigned ([\w, ]+);`).FindAllStringSubmatch(body, -1) {
		want = append(want, strings.Split(m[1], ", ")...)
	}
	if !slices.Equal(names[:], want) {
		t.Errorf("words %q\nwant %q", names, want)
	}
}

func TestSetIsSetBack(t *testing.T) {
	l := &Library{panel: make([]byte, 4*words)}
	t.Run("set", func(t *testing.T) {
		l.Set(t, ShortMax, 7)
		if l.Get(ShortMax) != 7 {
			t.Error("a word that was set is not there")
		}
	})
	if l.Get(ShortMax) != 0 || len(l.InUse()) != 0 {
		t.Errorf("%d, %v: want what was before", l.Get(ShortMax), l.InUse())
	}
	l.Put(Handles, 3)
	if got := l.InUse()["cufile handles"]; got != 3 {
		t.Errorf("%d handles in use, want 3", got)
	}
}
