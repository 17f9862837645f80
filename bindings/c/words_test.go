// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/engine"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPlainText: what programs in C and Python read names neither Go's sentinels nor its fields.
func TestPlainText(t *testing.T) {
	op := func(err error) error {
		return &engine.OpError{Op: "connect", Peer: "b", Backend: "shm", Err: err}
	}
	for _, c := range []struct {
		err  error
		want string
	}{
		{engine.ErrClosed, "it was closed"},
		{op(engine.ErrPeerLost), "connect peer b with shm: the peer is lost"},
		{op(fmt.Errorf("the name is taken: close that region first: %w", engine.ErrBusy)),
			"connect peer b with shm: the name is taken: close that region first"},
		{errReceiveClosed, "receive: the engine was closed"},
		{fmt.Errorf("config: TransfersMax is 9, at most 8: %w", engine.ErrBounds),
			"transfers_max is 9, at most 8"},
		{fmt.Errorf("config: Grace 1ms is below 5ms: %w", engine.ErrBounds),
			"grace 1ms is below 5ms"},
		{fmt.Errorf("9 imports, raise Config.KeysMax: %w", engine.ErrFull),
			"9 imports, raise keys_max"},
		{fmt.Errorf("notify peer b: %w", engine.ErrClosed), "notify peer b: it was closed"},
		{engine.ErrFull, "a limit is reached"},
		{op(fmt.Errorf("not a description: 7 bytes without the mark: %w", engine.ErrCorrupt)),
			"connect peer b with shm: not a description: 7 bytes without the mark"},
		{fmt.Errorf("import: %w", engine.ErrBadToken),
			"import: the token is cut, altered or of another engine"},
		{errors.Join(engine.ErrBusy, fmt.Errorf("allocate with Engine.Alloc: %w", os.ErrNotExist)),
			"it is in use\nallocate by the engine's alloc: file does not exist"},
	} {
		require.Equal(t, c.want, plainText(c.err))
	}
	for h, want := range map[uint64]string{
		0:                          "the engine is closed, or was never made",
		42:                         "0x2a is no handle, where an engine is wanted",
		uint64(kindRegion)<<56 | 1: "0x300000000000001 is a region, where an engine is wanted",
		uint64(kindEngine)<<56 | 1: "the engine was closed",
	} {
		require.Equal(t, want, (&staleError{want: kindEngine, handle: h}).Error())
	}
}

// TestNoGoNames holds the texts of all errors that can reach a program in C or Python against
// the names that only Go has.
func TestNoGoNames(t *testing.T) {
	goName := regexp.MustCompile(
		`\bConfig\.|config: [A-Z]|\bEngine\.[A-Z]|\bRoute\.|\bAllocOptions\b|\bhostmem\b`)
	texts := 0
	for _, folder := range []string{"engine", "backends/*", "csrc", "csrc/*", "driver",
		"internal/*", "identity", "kv/cache", "kv/cache/serve", "kv/handoff",
		"kv/layout", "kv/ring", "kv/sparse"} {
		files, err := filepath.Glob("../../" + folder + "/*.go")
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") || strings.Contains(name, "backends/fault/") {
				continue
			}
			for _, text := range errorTexts(t, name) {
				texts++
				text = plainText(errors.New(strings.ReplaceAll(text, "Config.%s",
					"Config.KeysMax")))
				assert.NotRegexp(t, goName, text, name)
			}
		}
	}
	require.Greater(t, texts, 300)
}

// errorTexts are the strings that a file makes errors of.
func errorTexts(t *testing.T, name string) (texts []string) {
	file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "Errorf" &&
			f.Sel.Name != "New" {
			return true
		}
		for _, arg := range call.Args {
			if lit, ok := arg.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				text, err := strconv.Unquote(lit.Value)
				require.NoError(t, err)
				texts = append(texts, text)
			}
		}
		return true
	})
	return texts
}
