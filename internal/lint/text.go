// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	spdx         = "SPDX-License-Identifier: Apache-2.0"
	fileLinesMax = 400
	funcLinesMax = 60

	abiHeader = "bindings/c/sluice.h" // one file, whatever its length: programs include it alone
)

// license wants one SPDX line on top, below the interpreter line of a script.
func license(f *File) []Finding {
	comment, ok := map[string]string{
		".go": "// ", ".c": "// ", ".h": "// ", ".cu": "// ", ".sh": "# ", ".py": "# ",
	}[path.Ext(f.Path)]
	if !ok {
		return nil
	}
	text := f.Text
	if strings.HasPrefix(text, "#!") {
		_, text, _ = strings.Cut(text, "\n")
	}
	first, _, _ := strings.Cut(text, "\n")
	if first == comment+spdx || isC(f) && first == "/* "+spdx+" */" {
		return nil
	}
	return []Finding{f.line(1, "no licence on the first line: write %q there", comment+spdx)}
}

// The words are put together here so that this file does not contain them.
var leftover = regexp.MustCompile(`\b(` + strings.Join([]string{"TO" + "DO", "FIX" + "ME",
	"XX" + "X"}, "|") + `)\b`)

// leftovers wants no notes to self.
func leftovers(f *File) []Finding {
	var found []Finding
	number := 0
	for line := range strings.Lines(f.Text) {
		number++
		if word := leftover.FindString(line); word != "" {
			found = append(found, f.line(number, "%s: do it now, or state the limit in the "+
				"documentation", word))
		}
	}
	return found
}

var vagueNames = []string{"util", "utils", "common", "core", "helper", "helpers", "types", "misc"}

// names wants packages and files to be called after what they do.
func names(f *File) []Finding {
	const advice = "%q says nothing: name it after what it does"
	var found []Finding
	base := strings.TrimSuffix(path.Base(f.Path), path.Ext(f.Path))
	if word := strings.TrimSuffix(base, "_test"); slices.Contains(vagueNames, word) {
		found = append(found, f.line(1, advice, path.Base(f.Path)))
	}
	if f.tree == nil {
		return found
	}
	pkg := strings.TrimSuffix(f.tree.Name.Name, "_test")
	for _, word := range []string{pkg, path.Base(f.dir())} {
		if slices.Contains(vagueNames, word) {
			return append(found, f.at(f.tree.Name.Pos(), advice, word))
		}
	}
	return found
}

func isC(f *File) bool { return slices.Contains([]string{".c", ".h", ".cu"}, path.Ext(f.Path)) }

// fileLength bounds what a reader must hold in mind.
func fileLength(f *File) []Finding {
	lines := strings.Count(f.Text, "\n")
	isCode := f.tree != nil || isC(f)
	if !isCode || f.isTest() || f.isGenerated() || lines <= fileLinesMax ||
		f.Path == abiHeader {
		return nil
	}
	return []Finding{f.line(fileLinesMax, "%d lines of at most %d: split it by meaning", lines,
		fileLinesMax)}
}

// funcLength bounds a function to what a screen shows.
func funcLength(f *File) []Finding {
	if f.isTest() || f.isGenerated() {
		return nil
	}
	var found []Finding
	for _, decl := range f.tree.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		lines := f.fset.Position(fn.End()).Line - f.fset.Position(fn.Pos()).Line + 1
		if lines > funcLinesMax {
			found = append(found, f.at(fn.Pos(), "%s has %d lines of at most %d: name its parts "+
				"and pull them out",
				fn.Name.Name, lines, funcLinesMax))
		}
	}
	return found
}
