// SPDX-License-Identifier: Apache-2.0

package fakecufile

import (
	"slices"
	"testing"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

func TestWordsAreThoseOfTheLibrary(t *testing.T) {
	want, err := standin.WordsOf("testdata/standin_panel.h")
	if err != nil || !slices.Equal(names[:], want) {
		t.Errorf("words %q\nwant %q, %v", names, want, err)
	}
}
