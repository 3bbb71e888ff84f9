// Grafana's own types, judging the dashboards: every key and every value of every panel, for each version in package.json.
//
// Law: says nothing about looks or data. A key must be known to the newest version; a value must be of the right type in
// every version that knows its key. What an older version does not know it ignores, and that is told.

import { existsSync, readFileSync, writeFileSync, mkdtempSync, rmSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import ts from 'typescript';

const HERE = dirname(fileURLToPath(import.meta.url));
const PANELS = {
  timeseries: 'timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen',
  stat: 'stat/panelcfg/x/StatPanelCfg_types.gen',
  'state-timeline': 'statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen',
  heatmap: 'heatmap/panelcfg/x/HeatmapPanelCfg_types.gen',
  table: 'table/panelcfg/x/TablePanelCfg_types.gen',
  gauge: 'gauge/panelcfg/x/GaugePanelCfg_types.gen',
  bargauge: 'bargauge/panelcfg/x/BarGaugePanelCfg_types.gen',
};
export const VERSIONS = ['10.4', '11.6', '12.4', '13.2'];

// A word of an enumeration is written as that word in JSON; and what is left out takes its default.
const PRELUDE = `
import type * as schema from '@grafana/schema';
type Written<T> = T extends string ? \`\${T}\` : T extends number | boolean | null | undefined ? T
  : T extends readonly (infer Each)[] ? readonly Written<Each>[]
  : T extends object ? { [Key in keyof T]?: Written<T[Key]> } : T;
type Query = Record<string, unknown>;
type Frame = Written<Omit<schema.Dashboard, 'panels' | 'templating' | 'annotations'>>;
type Variable = Written<Omit<schema.VariableModel, 'query'>> & { query?: unknown; definition?: string };
type Annotation = Written<Omit<schema.AnnotationQuery, 'target'>> & { target?: Query } & Record<string, unknown>;
type PanelOf<Options, Custom> = Written<Omit<schema.Panel, 'options' | 'fieldConfig' | 'targets' | 'type' | 'datasource'>> & {
  type: string; options?: Written<Options>; targets?: readonly Query[]; datasource?: schema.DataSourceRef;
  fieldConfig?: { readonly overrides: readonly Written<schema.FieldConfigSource['overrides'][number]>[];
    defaults: Written<Omit<schema.FieldConfigSource['defaults'], 'custom'>> & { custom?: Written<Custom> } };
};
`;

/** A program that assigns each part of each dashboard to its type. `strict` also finds keys that nobody knows. */
function program(boards, strict, customs) {
  const lines = [PRELUDE];
  for (const [kind, path] of Object.entries(PANELS)) {
    const name = kind.replace(/\W/g, '_');
    lines.push(`import type * as ${name} from '@grafana/schema/dist/esm/raw/composable/${path}';`);
    lines.push(`type ${name}_panel = PanelOf<${name}.Options, ${customs.has(kind) ? `${name}.FieldConfig` : 'Record<string, unknown>'}>;`);
  }
  const told = new Map();
  const assign = (type, value, where) => {
    const number = told.size;
    const text = JSON.stringify(value);
    const line = strict ? `const v${number}: ${type} = ${text};` : `const w${number} = ${text} as const; const v${number}: ${type} = w${number};`;
    told.set(lines.push(line) - 1, where);
  };
  for (const board of boards) {
    const { panels, templating, annotations, ...frame } = board;
    assign('Frame', frame, board.uid);
    templating.list.forEach((each) => assign('Variable', each, `${board.uid}: variable ${each.name}`));
    annotations.list.forEach((each) => assign('Annotation', each, `${board.uid}: annotation ${each.name}`));
    for (const panel of panels) {
      const type = panel.type === 'row' ? "Written<schema.RowPanel>" : `${panel.type.replace(/\W/g, '_')}_panel`;
      assign(type, panel, `${board.uid}: ${panel.title}`);
    }
  }
  // Lines of the text, which the prelude has more than one of.
  const before = PRELUDE.split('\n').length - 1;
  return { text: lines.join('\n'), where: (line) => told.get(line - before) ?? 'the program itself' };
}

function located(version) {
  const folder = join(HERE, 'node_modules', `schema-${version}`);
  const types = ['dist/types/index.d.ts', 'dist/esm/index.d.mts', 'dist/index.d.ts'].find((each) => existsSync(join(folder, each)));
  return { folder, types: join(folder, types) };
}

function compiled(version, source) {
  const { folder, types } = located(version);
  const work = mkdtempSync(join(HERE, '.types-'));
  try {
    const file = join(work, 'boards.ts');
    writeFileSync(file, source.text);
    const options = {
      noEmit: true, strict: true, skipLibCheck: true, module: ts.ModuleKind.ESNext, types: [],
      moduleResolution: ts.ModuleResolutionKind.Bundler, target: ts.ScriptTarget.ES2022,
      paths: { '@grafana/schema': [types], '@grafana/schema/*': [join(folder, '*')] },
    };
    return ts.getPreEmitDiagnostics(ts.createProgram([file], options)).map((each) => ({
      where: each.file?.fileName === file ? source.where(each.file.getLineAndCharacterOfPosition(each.start).line) : 'elsewhere',
      text: ts.flattenDiagnosticMessageText(each.messageText, '\n').split('\n').at(-1).trim(),
    }));
  } finally {
    rmSync(work, { recursive: true });
  }
}

/** Every complaint of every version. */
export function judged(boards) {
  const complaints = [];
  for (const version of VERSIONS) {
    const { folder } = located(version);
    const customs = new Set(Object.keys(PANELS).filter((kind) =>
      /\bFieldConfig\b/.test(readFileSync(join(folder, 'dist/esm/raw/composable', `${PANELS[kind]}.d.ts`), 'utf8').replace(/common\.\w+/g, ''))));
    const modes = version === VERSIONS.at(-1) ? [false, true] : [false];
    for (const strict of modes) {
      for (const { where, text } of compiled(version, program(boards, strict, customs))) complaints.push(`Grafana ${version}: ${where}: ${text}`);
    }
  }
  return complaints;
}
