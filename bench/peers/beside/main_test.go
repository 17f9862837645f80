// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRecordedRunIsPrintedAndWritten(t *testing.T) {
	out := filepath.Join(t.TempDir(), "deep", "report")
	var text bytes.Buffer
	err := beside(context.Background(), []string{"-from", "../testdata/recorded.json", "-out", out,
		"-envs", t.TempDir()}, &text, &text)
	if err == nil || !strings.Contains(err.Error(), "no picture") ||
		!strings.Contains(err.Error(), "setup.sh") {
		t.Errorf("without the library that draws: %v", err)
	}
	written, err := os.ReadFile(out + ".txt")
	if err != nil || !bytes.Equal(written, text.Bytes()) || text.Len() == 0 {
		t.Errorf("the text that was written is not the one that was printed: %v", err)
	}
	if again := beside(context.Background(), []string{"-from", out + ".json", "-out", out, "-envs",
		"."}, &bytes.Buffer{}, &text); again == nil ||
		!strings.Contains(again.Error(), "no picture") {
		t.Errorf("what was written is not read: %v", again)
	}
}

func TestBadCommandLines(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"now"}, `"now"`},
		{[]string{"-memory", "5 apples"}, "apples"},
		{[]string{"-only", "nobody"}, `"nobody"`},
		{[]string{"-lane", "moon"}, `"moon"`},
		{[]string{"-from", "/no/such/report"}, "/no/such/report"},
		{[]string{"-rounds", "many"}, "many"},
		{[]string{"-limit", "soon"}, "soon"},
		{[]string{"-lane", "file", "-only", "mooncake"}, `"mooncake"`},
	} {
		var said bytes.Buffer
		if err := beside(context.Background(), c.args, &said, &said); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%q: %v", c.args, err)
		}
	}
}
